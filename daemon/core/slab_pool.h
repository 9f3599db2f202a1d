// The slab pool: which slab belongs to whom, which of its slots are free, and from which slab the next slot comes.
//
// Invariant: a slab that is not free has one tenant and one layout, and free + live + limbo slots = its slots. Slots
// come from the fullest ready slab of their class, so that the others empty. The last `reserve` free slabs go to
// transcodes alone, because making room takes room. Slabs above a limit that was lowered go as they become free; until
// then transcodes may have the reserve beside what is in use, and less with each slab that goes.
#pragma once

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

#include "kvq/types.h"

namespace kvq {

enum class SlabState : std::uint8_t { free, creating, ready, draining };
const char* name(SlabState state);

struct SlotRef {
  SlabId slab{};
  SlotIndex slot{};
  friend constexpr bool operator==(const SlotRef&, const SlotRef&) = default;
};

struct Slab {
  SlabState state = SlabState::free;
  TenantId tenant{};
  LayoutId layout{};
  std::uint64_t page_bytes = 0;
  std::uint32_t slots = 0, live = 0, limbo = 0;
  std::uint32_t leaving = 0;  // live slots that a job is copying away
  std::uint64_t empty_since_ms = 0;
  bool used = false;                     // it has held a page since it became ready
  std::vector<std::uint64_t> free_bits;  // 1: free
  std::vector<PageId> page;              // of each live slot; null for free and limbo slots

  std::uint32_t free_slots() const { return slots - live - limbo; }
  bool empty() const { return live == 0 && limbo == 0; }
};

class SlabPool {
 public:
  // `places`: the most slabs that there may ever be; 0: `slabs`.
  SlabPool(std::uint32_t slabs, std::uint64_t slab_bytes, std::uint32_t reserve, std::uint32_t places = 0);

  std::uint32_t size() const { return static_cast<std::uint32_t>(slabs_.size()); }  // every slab's id is below
  std::uint32_t limit() const { return limit_; }
  std::uint32_t ceiling() const { return ceiling_; }  // the most that may be in use now: above the limit while used is
  std::uint32_t used_slabs() const { return used_slabs_; }
  std::uint32_t free_slabs() const { return limit_ - std::min(limit_, used_slabs_); }
  std::uint32_t over_slabs() const { return used_slabs_ - std::min(limit_, used_slabs_); }
  std::uint32_t reserve() const { return reserve_; }
  std::uint32_t usable_slabs() const { return limit_ - reserve_; }
  bool may_open(bool for_transcode) const { return used_slabs_ < (for_transcode ? ceiling_ : usable_slabs()); }
  // Precondition: above the reserve, and at most `places`.
  void set_limit(std::uint32_t slabs);
  std::uint64_t slab_bytes() const { return slab_bytes_; }
  const Slab& slab(SlabId id) const { return slabs_[raw(id)]; }
  bool names_slab(SlabId id) const { return raw(id) < slabs_.size(); }

  // free -> creating. Nothing when no slab is free, or only reserved ones are and `for_transcode` is false.
  std::optional<SlabId> open(TenantId tenant, LayoutId layout, std::uint64_t page_bytes, bool for_transcode);
  // The same for the very slab that an earlier daemon used, whatever the limit says. Precondition: it is free.
  void adopt(SlabId id, TenantId tenant, LayoutId layout, std::uint64_t page_bytes);
  // free -> live, at the very slot that a record names. False: it is taken already.
  bool occupy(SlotRef at, PageId page);
  // Every free slot of a ready slab -> limbo: nobody knows who may still read it. Calls `taken(slot)` for each.
  template <typename Taken>
  void take_all_free(SlabId id, Taken taken) {
    for (std::uint32_t i = 0; i < slab(id).slots; ++i) {
      if ((slab(id).free_bits[i / 64] >> (i % 64) & 1) == 0) continue;
      take_slot({id, SlotIndex{i}}, PageId{1});
      retire({id, SlotIndex{i}});
      taken(SlotRef{id, SlotIndex{i}});
    }
  }
  void set_ready(SlabId id, std::uint64_t now_ms);  // creating -> ready
  void start_drain(SlabId id);                      // ready or creating, and empty -> draining
  void close(SlabId id);                            // creating or draining, and empty -> free

  // A slot for `page` in a ready slab of this class, never in `except`.
  std::optional<SlotRef> take(TenantId tenant, LayoutId layout, PageId page,
                              std::optional<SlabId> except = std::nullopt);
  void retire(SlotRef at);                           // live -> limbo
  void reap(SlotRef at, std::uint64_t now_ms);       // limbo -> free
  void give_back(SlotRef at, std::uint64_t now_ms);  // live -> free: a slot that was never published
  void set_leaving(SlotRef at, bool leaving);

  // Slots of one class, over ready slabs / over slabs that are being created.
  std::uint32_t ready_free_slots(TenantId tenant, LayoutId layout) const;
  std::uint32_t creating_slots(TenantId tenant, LayoutId layout) const;
  bool layout_in_use(LayoutId layout) const;

  std::uint64_t offset_bytes(SlotRef at) const {
    return std::uint64_t{raw(at.slab)} * slab_bytes_ + std::uint64_t{raw(at.slot)} * slabs_[raw(at.slab)].page_bytes;
  }

  // New slots are looked for from scratch again: the fullest slab may have changed.
  void forget_hints();

  void check_invariants() const;

 private:
  struct Class {
    std::vector<SlabId> slabs;
    std::optional<SlabId> hint;  // the slab that slots come from until it is full
    std::uint32_t ready_free = 0;
  };
  static std::uint64_t class_key(TenantId tenant, LayoutId layout) {
    return (std::uint64_t{raw(tenant)} << 32) | raw(layout);
  }
  Slab& at(SlabId id);
  Class& class_of(const Slab& s) { return classes_.at(class_key(s.tenant, s.layout)); }
  void free_slot(SlotRef at, std::uint64_t now_ms);
  void take_slot(SlotRef at, PageId page);
  void claim(SlabId id, TenantId tenant, LayoutId layout, std::uint64_t page_bytes);

  std::uint64_t slab_bytes_;
  std::uint32_t reserve_, limit_, places_, ceiling_;
  std::uint32_t used_slabs_ = 0;
  std::vector<Slab> slabs_;
  std::unordered_map<std::uint64_t, Class> classes_;
};

}  // namespace kvq
