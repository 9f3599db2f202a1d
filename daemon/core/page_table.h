// The page table: one record for each page id of a tenant, and the lists from which victims are taken.
//
// Invariant: a page changes state only along the edges drawn here; anything else asserts. A page is on a victim list
// exactly when its record says that it is a candidate, so that planning never walks all pages.
//
//   free -> credit -> open -> sealing -> sealed <-> transcoding
//                                          sealed -> lost
//   each of these but free -> retired -> free (reaped from limbo)
#pragma once

#include <array>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "daemon/core/journal.h"
#include "daemon/core/page_list.h"
#include "kvq/directory.h"
#include "kvq/prefix_table.h"
#include "kvq/types.h"

namespace kvq {

// Stored in page records: never renumber.
enum class PageState : std::uint8_t {
  free = 0,
  credit = 1,       // in a session's magazine, or taken out of it and not yet bound to a sequence
  open = 2,         // in one sequence; its session may write it
  sealing = 3,      // complete; waits for the end of the step that writes it
  sealed = 4,       // immutable, readable at its slot
  transcoding = 5,  // immutable, readable at its slot, a job reads it
  retired = 6,      // in limbo with its slot
  lost = 7,         // its bytes are not what they were: nobody may read them, its slot waits for its holders
};
inline constexpr std::size_t kPageStates = 8;
const char* name(PageState state);

inline constexpr std::uint16_t kPageIndexed = 1;     // the prefix table names it
inline constexpr std::uint16_t kPageKeepsDense = 2;  // its values cannot be quantized
inline constexpr std::uint16_t kPageHasKey = 4;  // `key` names its content (also of a duplicate, which is not indexed)
inline constexpr std::uint16_t kPageHasChecksum = 8;
inline constexpr std::uint16_t kPageTurnsCold = 16;    // a job rewrites it in the cold format
inline constexpr std::uint16_t kPageSealPrivate = 32;  // while sealing: it gets no name
inline constexpr std::uint16_t kPageFlags = 63;        // all that exist

inline constexpr std::uint8_t kMaxFailures = 3;  // transcodes of one page in a row, before it is left alone

// Durable: lies in a daemon-private memfd (shm/table_file.h). All zero: a free page.
struct alignas(32) PageRecord {
  Key key;
  PageId parent;  // the indexed page before it, null at the root; meaningful while indexed
  SlabId slab;
  SlotIndex slot;
  std::uint16_t generation;
  Format format;
  PageState state;
  std::uint16_t model;  // core/layouts.h
  std::uint16_t flags;
  SessionId owner;  // of a credit, open or sealing page
  std::uint64_t last_use_ms;
  std::uint64_t checksum;       // XXH3 of its slot's bytes, with kPageHasChecksum
  std::uint64_t seal_serial;    // while sealing: the step that writes it, 0: none
  SessionId seal_session;       // whose step
  std::uint32_t seal_sequence;  // record of the sequence
  std::uint32_t seal_index;     // place in its block table
  std::uint32_t reserved;
};
static_assert(sizeof(PageRecord) == 96);

// What one sequence's hold on a page adds to its counts.
struct Hold {
  bool reference = false;
  bool running = false;   // the sequence runs: the page has to stay on the device
  bool protect = false;   // window, sink or format floor: the page has to stay dense
  bool immobile = false;  // a holder cannot map new slabs: the page has to stay where it is
  friend constexpr bool operator==(const Hold&, const Hold&) = default;
};

// Derived: rebuilt from records and block tables.
struct PageUse {
  std::uint32_t references = 0, running = 0, protections = 0, immobile = 0;
  std::uint32_t children = 0;  // indexed pages whose parent this is
  std::uint8_t failures = 0;   // of transcodes in a row
  std::uint32_t moves = 0;     // to another place, under this generation
};

using FormatCounts = std::array<std::uint32_t, kFormatCount>;

enum class VictimList : std::uint8_t { none, idle, running, cached };

class PageTable {
 public:
  // `records`: record 0 for the null page; they outlive the table. All zero, or checked (record_check.h) and with
  // `uses` counted from the block tables. `quantizable`: false keeps every page dense.
  PageTable(std::span<PageRecord> records, bool quantizable, JournalRegion journal = {},
            std::vector<PageUse> uses = {});

  bool names_page(PageId page) const { return raw(page) != 0 && raw(page) < records_.size(); }
  const PageRecord& record(PageId page) const { return records_[raw(page)]; }
  const PageUse& use(PageId page) const { return uses_[raw(page)]; }
  std::uint32_t capacity() const { return static_cast<std::uint32_t>(records_.size()); }
  std::uint32_t free_pages() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t count(PageState state) const { return state_count_[static_cast<std::size_t>(state)]; }
  // What the prefix table names, by format; `cached`: of these, sealed or transcoding and held by no sequence.
  const FormatCounts& indexed() const { return indexed_; }
  const FormatCounts& cached() const { return cached_; }
  std::uint32_t cached_pages() const { return std::accumulate(cached_.begin(), cached_.end(), 0u); }

  struct Place {
    SlabId slab{};
    SlotIndex slot{};
    Format format = Format::none;
  };
  // free -> credit. Precondition: free_pages() > 0; next_free() is the id it will use.
  PageId next_free() const { return free_.back(); }
  PageId allocate(const Place& place, std::uint16_t model, SessionId owner, std::uint64_t now_ms);
  // retired -> free: a new generation, no key, nothing that points anywhere.
  void release_id(PageId page);

  void move(PageId page, PageState to);  // every other edge
  void set_place(PageId page, const Place& place);
  struct Seal {
    SessionId session{};
    std::uint64_t serial = 0;
    std::uint32_t sequence = 0, index = 0;
    bool is_private = false;
    Key key{};
  };
  void set_seal(PageId page, const Seal& seal);  // open -> sealing
  void confirm_key(PageId page);                 // the key of set_seal names its content
  void set_checksum(PageId page, std::uint64_t checksum);
  void set_turns_cold(PageId page, bool turns);
  void set_quantizable(bool quantizable);
  void set_indexed(PageId page, PageId parent);
  void clear_indexed(PageId page);
  void set_keeps_dense(PageId page);
  void count_failure(PageId page, bool failed);  // false: forget earlier ones
  void touch(PageId page, std::uint64_t now_ms);
  void change_hold(PageId page, const Hold& before, const Hold& after);

  // Candidates, longest unused first. idle: dense, sealed, in no running sequence. running: dense, sealed, outside
  // every window, sink and floor. cached: held by no sequence, without indexed children.
  std::uint32_t victims(VictimList list) const;
  VictimList quantize_list(PageId page) const { return quantize_member_[raw(page)]; }  // none, idle or running
  bool droppable(PageId page) const { return drop_member_[raw(page)] != 0; }
  PageId first_victim(VictimList list) const;
  PageId next_victim(VictimList list, PageId page) const;

 private:
  PageRecord& change(PageId page);  // saved in the journal first
  void index_records();
  void refresh(PageId page);
  VictimList wanted_list(const PageRecord& record, const PageUse& use) const;
  void enlist(PageList& list, PageId page);

  std::span<PageRecord> records_;
  bool quantizable_;
  JournalRegion journal_;
  std::vector<PageUse> uses_;
  std::vector<PageId> free_;
  std::array<std::uint32_t, kPageStates> state_count_{};
  FormatCounts indexed_{}, cached_{};
  std::vector<VictimList> quantize_member_;
  std::vector<std::uint8_t> drop_member_;
  std::vector<Format> counted_indexed_, counted_cached_;  // none: not counted
  PageLinks quantize_links_, drop_links_;
  PageList idle_, running_, drop_;
};

}  // namespace kvq
