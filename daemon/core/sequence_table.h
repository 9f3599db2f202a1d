// The sequence table: the block tables of all sequences, in fixed memory.
//
// Invariant: places below a sequence's page count change only after they are in the journal; places beyond it may hold
// anything. A chunk names its owner and ordinal, so that the block tables can be put together again from the chunks
// alone.
//
//   SequenceRecord[] (64 bytes each, record 0 unused)        TableChunk[] (256 bytes each: owner, ordinal, 62 page ids)
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "daemon/core/journal.h"
#include "daemon/core/page_table.h"
#include "kvq/types.h"

namespace kvq {

enum class SequenceIndex : std::uint32_t {};  // place of a sequence's record

inline constexpr std::uint16_t kSequenceLive = 1;
inline constexpr std::uint16_t kSequenceRunning = 2;
inline constexpr std::uint16_t kSequenceFloorDense = 4;
inline constexpr std::uint16_t kSequenceImmobile = 8;  // its session lost its connection: it cannot map new slabs

struct alignas(64) SequenceRecord {
  SessionId session;
  SequenceId id;
  TenantId tenant;
  std::uint32_t pages;       // length of the block table
  std::uint32_t first_kept;  // pages below it were given up; their places hold the null page
  std::uint16_t flags;
  std::uint16_t reserved;
  std::uint64_t tokens;  // committed
  std::uint64_t last_use_ms;
  std::uint64_t reserved1[3];
};
static_assert(sizeof(SequenceRecord) == 64);

inline constexpr std::uint32_t kChunkPages = 62;

struct TableChunk {
  std::uint32_t owner;  // record of the sequence, 0: free
  std::uint32_t ordinal;
  PageId page[kChunkPages];
};
static_assert(sizeof(TableChunk) == 256);

// Which pages of a running sequence stay dense.
struct WindowPolicy {
  std::uint32_t window_pages = 2;  // the newest
  std::uint32_t sink_pages = 1;    // the first
};

// What sequence `s` holds on the page at `index`, as if its block table had `pages` pages.
Hold hold_of(const SequenceRecord& s, std::uint32_t index, std::uint32_t pages, const WindowPolicy& policy);

class SequenceTable {
 public:
  // Both all zero, or checked (record_check.h); they outlive the table. Chunks that no sequence needs become free.
  SequenceTable(std::span<SequenceRecord> records, std::span<TableChunk> chunks, JournalRegion record_journal = {},
                JournalRegion chunk_journal = {});

  std::optional<SequenceIndex> create(SessionId session, SequenceId id, TenantId tenant, std::uint16_t flags,
                                      std::uint64_t now_ms);
  // The sequence has no pages left.
  void destroy(SequenceIndex s);

  const SequenceRecord& record(SequenceIndex s) const { return records_[raw(s)]; }
  PageId page(SequenceIndex s, std::uint32_t index) const;
  bool has_room(SequenceIndex s) const {  // for one more page
    return record(s).pages < chunk_list_[raw(s)].size() * kChunkPages || !free_chunks_.empty();
  }
  bool append(SequenceIndex s, PageId page);                 // false: no room
  void cut(SequenceIndex s, std::uint32_t pages);            // the block table ends after `pages`
  void forget_before(SequenceIndex s, std::uint32_t index);  // [first_kept, index) become the null page
  void set_flags(SequenceIndex s, std::uint16_t flags) { change(s).flags = flags; }
  void commit(SequenceIndex s, std::uint64_t tokens, std::uint64_t now_ms);

  template <typename Body>  // body(index, record), in order of index
  void each_live(Body body) const {
    for (std::uint32_t i = 1; i < records_.size(); ++i) {
      if ((records_[i].flags & kSequenceLive) != 0) body(SequenceIndex{i}, records_[i]);
    }
  }

  std::uint32_t live() const { return static_cast<std::uint32_t>(records_.size() - 1 - free_records_.size()); }
  std::uint32_t free_chunks() const { return static_cast<std::uint32_t>(free_chunks_.size()); }

 private:
  SequenceRecord& change(SequenceIndex s) {
    record_journal_.save(records_[raw(s)]);
    return records_[raw(s)];
  }
  TableChunk& chunk_of(SequenceIndex s, std::uint32_t index) {
    return chunks_[chunk_list_[raw(s)][index / kChunkPages]];
  }

  std::span<SequenceRecord> records_;
  std::span<TableChunk> chunks_;
  JournalRegion record_journal_, chunk_journal_;
  std::vector<std::uint32_t> free_records_, free_chunks_;
  std::vector<std::vector<std::uint32_t>> chunk_list_;  // derived: the chunks of each sequence, by ordinal
};

}  // namespace kvq
