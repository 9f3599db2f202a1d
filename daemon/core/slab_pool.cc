// Keeps slab_pool.h's conservation of slots; every change of a slab's counts is in this file.
#include "daemon/core/slab_pool.h"

#include <algorithm>
#include <bit>

#include "kvq/result.h"

namespace kvq {

const char* name(SlabState state) {
  constexpr const char* kNames[] = {"free", "creating", "ready", "draining"};
  return kNames[static_cast<std::size_t>(state)];
}

SlabPool::SlabPool(std::uint32_t slabs, std::uint64_t slab_bytes, std::uint32_t reserve, std::uint32_t places)
    : slab_bytes_(slab_bytes),
      reserve_(std::min(reserve, slabs)),
      limit_(slabs),
      places_(std::max(slabs, places)),
      ceiling_(slabs),
      slabs_(slabs) {}

void SlabPool::set_limit(std::uint32_t slabs) {
  KVQ_ASSERT(slabs > reserve_ && slabs <= places_);
  limit_ = slabs;
  ceiling_ = used_slabs_ > limit_ ? std::min(places_, used_slabs_ + reserve_) : limit_;
  if (slabs_.size() < ceiling_) slabs_.resize(ceiling_);
}

Slab& SlabPool::at(SlabId id) {
  KVQ_ASSERT(names_slab(id));
  return slabs_[raw(id)];
}

std::optional<SlabId> SlabPool::open(TenantId tenant, LayoutId layout, std::uint64_t page_bytes, bool for_transcode) {
  if (!may_open(for_transcode)) return std::nullopt;
  std::uint32_t i = 0;
  while (slabs_[i].state != SlabState::free) ++i;
  claim(SlabId{i}, tenant, layout, page_bytes);
  return SlabId{i};
}

void SlabPool::adopt(SlabId id, TenantId tenant, LayoutId layout, std::uint64_t page_bytes) {
  KVQ_ASSERT(raw(id) < places_);
  if (!names_slab(id)) slabs_.resize(raw(id) + 1);
  KVQ_ASSERT(at(id).state == SlabState::free);
  claim(id, tenant, layout, page_bytes);
}

void SlabPool::claim(SlabId id, TenantId tenant, LayoutId layout, std::uint64_t page_bytes) {
  KVQ_ASSERT(page_bytes > 0 && page_bytes <= slab_bytes_ && page_bytes % kOffsetUnitBytes == 0);
  Slab& s = at(id);
  s.state = SlabState::creating;
  s.tenant = tenant;
  s.layout = layout;
  s.page_bytes = page_bytes;
  s.slots = static_cast<std::uint32_t>(slab_bytes_ / page_bytes);
  s.free_bits.assign((s.slots + 63) / 64, ~std::uint64_t{0});
  if (s.slots % 64 != 0) s.free_bits.back() = (std::uint64_t{1} << (s.slots % 64)) - 1;
  s.page.assign(s.slots, kNullPage);
  ++used_slabs_;
  classes_[class_key(tenant, layout)].slabs.push_back(id);
}

bool SlabPool::occupy(SlotRef where, PageId page) {
  const Slab& s = at(where.slab);
  KVQ_ASSERT(raw(where.slot) < s.slots && s.state == SlabState::ready);
  if ((s.free_bits[raw(where.slot) / 64] >> (raw(where.slot) % 64) & 1) == 0) return false;
  take_slot(where, page);
  return true;
}

void SlabPool::take_slot(SlotRef where, PageId page) {
  Slab& s = at(where.slab);
  s.free_bits[raw(where.slot) / 64] &= ~(std::uint64_t{1} << (raw(where.slot) % 64));
  s.page[raw(where.slot)] = page;
  s.used = true;
  ++s.live;
  --class_of(s).ready_free;
}

void SlabPool::set_ready(SlabId id, std::uint64_t now_ms) {
  Slab& s = at(id);
  KVQ_ASSERT(s.state == SlabState::creating);
  s.state = SlabState::ready;
  s.empty_since_ms = now_ms;
  class_of(s).ready_free += s.free_slots();
}

void SlabPool::start_drain(SlabId id) {
  Slab& s = at(id);
  KVQ_ASSERT(s.empty() && (s.state == SlabState::ready || s.state == SlabState::creating));
  Class& c = class_of(s);
  if (s.state == SlabState::ready) c.ready_free -= s.slots;
  if (c.hint == id) c.hint.reset();
  s.state = SlabState::draining;
}

void SlabPool::close(SlabId id) {
  Slab& s = at(id);
  KVQ_ASSERT(s.empty() && (s.state == SlabState::draining || s.state == SlabState::creating));
  std::erase(class_of(s).slabs, id);
  s = Slab{};
  --used_slabs_;
  ceiling_ = used_slabs_ > limit_ ? std::min(ceiling_, used_slabs_ + reserve_) : limit_;
}

std::optional<SlotRef> SlabPool::take(TenantId tenant, LayoutId layout, PageId page, std::optional<SlabId> except) {
  const auto found = classes_.find(class_key(tenant, layout));
  if (found == classes_.end()) return std::nullopt;
  Class& c = found->second;
  const auto usable = [&](SlabId id) {
    const Slab& s = slabs_[raw(id)];
    return s.state == SlabState::ready && s.free_slots() > 0 && id != except;
  };
  std::optional<SlabId> chosen = c.hint;
  if (!chosen || !usable(*chosen)) {
    chosen.reset();
    for (SlabId id : c.slabs) {
      if (usable(id) && (!chosen || slabs_[raw(id)].live > slabs_[raw(*chosen)].live)) chosen = id;
    }
    if (!chosen) return std::nullopt;
    if (!except) c.hint = chosen;
  }
  const Slab& s = slabs_[raw(*chosen)];
  std::size_t word = 0;
  while (s.free_bits[word] == 0) ++word;
  const auto slot = static_cast<std::uint32_t>(word * 64 + static_cast<unsigned>(std::countr_zero(s.free_bits[word])));
  take_slot({*chosen, SlotIndex{slot}}, page);
  return SlotRef{*chosen, SlotIndex{slot}};
}

void SlabPool::retire(SlotRef where) {
  Slab& s = at(where.slab);
  KVQ_ASSERT(s.live > 0 && s.page[raw(where.slot)] != kNullPage);
  s.page[raw(where.slot)] = kNullPage;
  --s.live;
  ++s.limbo;
}

void SlabPool::reap(SlotRef where, std::uint64_t now_ms) {
  Slab& s = at(where.slab);
  KVQ_ASSERT(s.limbo > 0 && s.page[raw(where.slot)] == kNullPage);
  --s.limbo;
  free_slot(where, now_ms);
}

void SlabPool::give_back(SlotRef where, std::uint64_t now_ms) {
  Slab& s = at(where.slab);
  KVQ_ASSERT(s.live > 0 && s.page[raw(where.slot)] != kNullPage);
  s.page[raw(where.slot)] = kNullPage;
  --s.live;
  free_slot(where, now_ms);
}

void SlabPool::free_slot(SlotRef where, std::uint64_t now_ms) {
  Slab& s = at(where.slab);
  std::uint64_t& word = s.free_bits[raw(where.slot) / 64];
  const std::uint64_t mask = std::uint64_t{1} << (raw(where.slot) % 64);
  KVQ_ASSERT((word & mask) == 0 && s.state == SlabState::ready);  // a slot is freed once
  word |= mask;
  ++class_of(s).ready_free;
  if (s.empty()) s.empty_since_ms = now_ms;
}

void SlabPool::set_leaving(SlotRef where, bool leaving) {
  Slab& s = at(where.slab);
  KVQ_ASSERT(leaving || s.leaving > 0);
  s.leaving = leaving ? s.leaving + 1 : s.leaving - 1;
}

std::uint32_t SlabPool::ready_free_slots(TenantId tenant, LayoutId layout) const {
  const auto found = classes_.find(class_key(tenant, layout));
  return found == classes_.end() ? 0 : found->second.ready_free;
}

std::uint32_t SlabPool::creating_slots(TenantId tenant, LayoutId layout) const {
  const auto found = classes_.find(class_key(tenant, layout));
  std::uint32_t slots = 0;
  if (found == classes_.end()) return slots;
  for (SlabId id : found->second.slabs) slots += slab(id).state == SlabState::creating ? slab(id).slots : 0;
  return slots;
}

bool SlabPool::layout_in_use(LayoutId layout) const {
  return std::any_of(slabs_.begin(), slabs_.end(),
                     [&](const Slab& s) { return s.state != SlabState::free && s.layout == layout; });
}

void SlabPool::forget_hints() {
  for (auto& [key, c] : classes_) c.hint.reset();
}

void SlabPool::check_invariants() const {
  std::uint32_t used = 0;
  std::unordered_map<std::uint64_t, std::uint32_t> ready_free;
  for (const Slab& s : slabs_) {
    if (s.state == SlabState::free) continue;
    ++used;
    std::uint32_t bits = 0, live = 0;
    for (std::uint64_t word : s.free_bits) bits += static_cast<std::uint32_t>(std::popcount(word));
    for (PageId page : s.page) live += page != kNullPage ? 1 : 0;
    KVQ_ASSERT(bits == s.free_slots() && live == s.live && s.leaving <= s.live);
    KVQ_ASSERT(s.state == SlabState::ready || s.empty());
    if (s.state == SlabState::ready) ready_free[class_key(s.tenant, s.layout)] += bits;
  }
  KVQ_ASSERT(used == used_slabs_ && limit_ <= ceiling_ && ceiling_ <= size() && size() <= places_);
  for (const auto& [key, c] : classes_) KVQ_ASSERT(c.ready_free == ready_free[key]);
}

}  // namespace kvq
