// Keeps page_table.h's edges and victim lists. Every function that changes what a list depends on ends in refresh().
#include "daemon/core/page_table.h"

#include <algorithm>
#include <utility>

#include "kvq/result.h"

namespace kvq {
namespace {

constexpr std::uint8_t bit(PageState s) { return static_cast<std::uint8_t>(1u << static_cast<unsigned>(s)); }

// kEdges[from]: the states that may follow.
constexpr std::uint8_t kEdges[kPageStates] = {
    bit(PageState::credit),
    static_cast<std::uint8_t>(bit(PageState::open) | bit(PageState::retired)),
    static_cast<std::uint8_t>(bit(PageState::sealing) | bit(PageState::retired)),
    static_cast<std::uint8_t>(bit(PageState::sealed) | bit(PageState::retired)),
    static_cast<std::uint8_t>(bit(PageState::transcoding) | bit(PageState::retired) | bit(PageState::lost)),
    static_cast<std::uint8_t>(bit(PageState::sealed) | bit(PageState::retired)),
    bit(PageState::free),
    bit(PageState::retired),
};

std::uint32_t changed(std::uint32_t count, bool before, bool after) {
  KVQ_ASSERT(!before || count > 0);
  return count - (before ? 1 : 0) + (after ? 1 : 0);
}

void recount(FormatCounts& counts, Format& counted, Format now) {
  if (counted == now) return;
  if (counted != Format::none) --counts[static_cast<std::size_t>(counted)];
  if (now != Format::none) ++counts[static_cast<std::size_t>(now)];
  counted = now;
}

}  // namespace

const char* name(PageState state) {
  constexpr const char* kNames[kPageStates] = {"free",   "credit",      "open",    "sealing",
                                               "sealed", "transcoding", "retired", "lost"};
  return kNames[static_cast<std::size_t>(state)];
}

PageTable::PageTable(std::span<PageRecord> records, bool quantizable, JournalRegion journal, std::vector<PageUse> uses)
    : records_(records),
      quantizable_(quantizable),
      journal_(journal),
      uses_(std::move(uses)),
      quantize_member_(records.size(), VictimList::none),
      drop_member_(records.size(), 0),
      counted_indexed_(records.size(), Format::none),
      counted_cached_(records.size(), Format::none),
      quantize_links_(records.size()),
      drop_links_(records.size()) {
  KVQ_ASSERT(records.size() > 1);
  uses_.resize(records.size());
  index_records();
}

void PageTable::index_records() {
  free_.reserve(records_.size() - 1);
  std::vector<PageId> used;
  for (std::size_t i = records_.size() - 1; i > 0; --i) {
    const PageId page{static_cast<std::uint32_t>(i)};
    ++state_count_[static_cast<std::size_t>(records_[i].state)];
    if (records_[i].state == PageState::free) {
      free_.push_back(page);
    } else {
      used.push_back(page);
    }
  }
  // In the lists' order, so that each insertion is at the end.
  std::stable_sort(used.begin(), used.end(),
                   [this](PageId a, PageId b) { return record(a).last_use_ms < record(b).last_use_ms; });
  for (PageId page : used) refresh(page);
}

PageRecord& PageTable::change(PageId page) {
  KVQ_ASSERT(names_page(page));
  PageRecord& r = records_[raw(page)];
  journal_.save(r);
  return r;
}

PageId PageTable::allocate(const Place& place, std::uint16_t model, SessionId owner, std::uint64_t now_ms) {
  KVQ_ASSERT(!free_.empty());
  const PageId page = free_.back();
  free_.pop_back();
  PageRecord& r = change(page);
  const std::uint16_t generation = r.generation;
  r = PageRecord{};  // what a damaged state may have left in a free record ends here
  r.generation = generation;
  r.slab = place.slab;
  r.slot = place.slot;
  r.format = place.format;
  r.model = model;
  r.owner = owner;
  r.last_use_ms = now_ms;
  move(page, PageState::credit);
  return page;
}

void PageTable::release_id(PageId page) {
  move(page, PageState::free);
  PageRecord& r = change(page);
  KVQ_ASSERT((r.flags & kPageIndexed) == 0 && use(page).references == 0 && use(page).children == 0);
  const auto generation = static_cast<std::uint16_t>(r.generation + 1);
  r = PageRecord{};
  r.generation = generation;
  uses_[raw(page)] = PageUse{};
  free_.push_back(page);
}

void PageTable::move(PageId page, PageState to) {
  PageRecord& r = change(page);
  KVQ_ASSERT((kEdges[static_cast<std::size_t>(r.state)] & bit(to)) != 0);
  KVQ_ASSERT(to != PageState::retired || (use(page).references == 0 && (r.flags & kPageIndexed) == 0));
  --state_count_[static_cast<std::size_t>(r.state)];
  ++state_count_[static_cast<std::size_t>(to)];
  r.state = to;
  if (to == PageState::sealed) r.owner = SessionId{};
  refresh(page);
}

void PageTable::set_place(PageId page, const Place& place) {
  PageRecord& r = change(page);
  KVQ_ASSERT(r.state == PageState::transcoding);
  r.slab = place.slab;
  r.slot = place.slot;
  r.format = place.format;
  r.flags &= static_cast<std::uint16_t>(~kPageHasChecksum);  // of the old place
  ++uses_[raw(page)].moves;
}

void PageTable::set_seal(PageId page, const Seal& seal) {
  PageRecord& r = change(page);
  r.key = seal.key;
  r.seal_serial = seal.serial;
  r.seal_session = seal.session;
  r.seal_sequence = seal.sequence;
  r.seal_index = seal.index;
  if (seal.is_private) r.flags |= kPageSealPrivate;
  move(page, PageState::sealing);
}

void PageTable::confirm_key(PageId page) {
  PageRecord& r = change(page);
  KVQ_ASSERT(r.state == PageState::sealing);
  r.flags |= kPageHasKey;
}

void PageTable::set_checksum(PageId page, std::uint64_t checksum) {
#if !defined(KVQ_WITHOUT_CHECKSUMS)  // an older kvqd, for the tests of upgrades: its records have none
  PageRecord& r = change(page);
  r.checksum = checksum;
  r.flags |= kPageHasChecksum;
#else
  (void)page, (void)checksum;
#endif
}

void PageTable::set_quantizable(bool quantizable) {
  if (std::exchange(quantizable_, quantizable) == quantizable) return;
  for (std::uint32_t i = 1; i < records_.size(); ++i) refresh(PageId{i});
}

void PageTable::set_turns_cold(PageId page, bool turns) {
  PageRecord& r = change(page);
  r.flags = static_cast<std::uint16_t>(turns ? r.flags | kPageTurnsCold : r.flags & ~kPageTurnsCold);
}

void PageTable::set_indexed(PageId page, PageId parent) {
  PageRecord& r = change(page);
  KVQ_ASSERT((r.flags & (kPageHasKey | kPageIndexed)) == kPageHasKey && r.state == PageState::sealing);
  r.parent = parent;
  r.flags |= kPageIndexed;
  if (parent != kNullPage) {
    KVQ_ASSERT((record(parent).flags & kPageIndexed) != 0);
    ++uses_[raw(parent)].children;
    refresh(parent);
  }
  refresh(page);
}

void PageTable::clear_indexed(PageId page) {
  PageRecord& r = change(page);
  KVQ_ASSERT((r.flags & kPageIndexed) != 0 && use(page).children == 0);
  r.flags &= static_cast<std::uint16_t>(~kPageIndexed);
  const PageId parent = r.parent;
  r.parent = kNullPage;
  refresh(page);
  if (parent != kNullPage) {
    uses_[raw(parent)].children = changed(uses_[raw(parent)].children, true, false);
    refresh(parent);
  }
}

void PageTable::set_keeps_dense(PageId page) {
  change(page).flags |= kPageKeepsDense;
  refresh(page);
}

void PageTable::count_failure(PageId page, bool failed) {
  PageUse& u = uses_[raw(page)];
  u.failures = failed ? static_cast<std::uint8_t>(u.failures + 1) : 0;
  if (u.failures >= kMaxFailures) set_keeps_dense(page);
}

void PageTable::touch(PageId page, std::uint64_t now_ms) {
  PageRecord& r = records_[raw(page)];  // when it was used last is no fact that a crash must keep
  if (r.last_use_ms >= now_ms) return;
  // Take it out of its lists first: their order is by this stamp.
  const VictimList list = quantize_member_[raw(page)];
  if (list != VictimList::none) (list == VictimList::idle ? idle_ : running_).erase(quantize_links_, page);
  if (drop_member_[raw(page)] != 0) drop_.erase(drop_links_, page);
  quantize_member_[raw(page)] = VictimList::none;
  drop_member_[raw(page)] = 0;
  r.last_use_ms = now_ms;
  refresh(page);
}

void PageTable::change_hold(PageId page, const Hold& before, const Hold& after) {
  if (before == after) return;
  KVQ_ASSERT(names_page(page));
  PageUse& u = uses_[raw(page)];
  u.references = changed(u.references, before.reference, after.reference);
  u.running = changed(u.running, before.running, after.running);
  u.protections = changed(u.protections, before.protect, after.protect);
  u.immobile = changed(u.immobile, before.immobile, after.immobile);
  refresh(page);
}

VictimList PageTable::wanted_list(const PageRecord& r, const PageUse& u) const {
  if (!quantizable_ || r.state != PageState::sealed || r.format != Format::dense) return VictimList::none;
  if ((r.flags & kPageKeepsDense) != 0 || u.protections > 0 || u.immobile > 0) return VictimList::none;
  return u.running > 0 ? VictimList::running : VictimList::idle;
}

void PageTable::enlist(PageList& list, PageId page) {
  list.insert(&list == &drop_ ? drop_links_ : quantize_links_, page,
              [this](PageId p) { return records_[raw(p)].last_use_ms; });
}

void PageTable::refresh(PageId page) {
  const PageRecord& r = record(page);
  const PageUse& u = use(page);
  const std::size_t i = raw(page);
  if (const VictimList now = wanted_list(r, u); now != quantize_member_[i]) {
    const VictimList old = quantize_member_[i];
    if (old != VictimList::none) (old == VictimList::idle ? idle_ : running_).erase(quantize_links_, page);
    if (now != VictimList::none) enlist(now == VictimList::idle ? idle_ : running_, page);
    quantize_member_[i] = now;
  }
  const bool indexed = (r.flags & kPageIndexed) != 0;
  const bool drop = r.state == PageState::sealed && u.references == 0 && indexed && u.children == 0;
  if (drop != (drop_member_[i] != 0)) {
    if (drop) {
      enlist(drop_, page);
    } else {
      drop_.erase(drop_links_, page);
    }
    drop_member_[i] = drop ? 1 : 0;
  }
  const bool cached =
      indexed && u.references == 0 && (r.state == PageState::sealed || r.state == PageState::transcoding);
  recount(indexed_, counted_indexed_[i], indexed ? r.format : Format::none);
  recount(cached_, counted_cached_[i], cached ? r.format : Format::none);
}

std::uint32_t PageTable::victims(VictimList list) const {
  return list == VictimList::idle ? idle_.size() : list == VictimList::running ? running_.size() : drop_.size();
}

PageId PageTable::first_victim(VictimList list) const {
  return list == VictimList::idle ? idle_.first() : list == VictimList::running ? running_.first() : drop_.first();
}

PageId PageTable::next_victim(VictimList list, PageId page) const {
  return (list == VictimList::cached ? drop_links_ : quantize_links_)[raw(page)].next;
}

}  // namespace kvq
