// Sequences: every change of a block table, and of the holds on pages that follow from it.
//
// Invariant: after each function a page's counts are the sum of hold_of() over all places of all block tables.
#include <algorithm>

#include "daemon/store_state.h"

namespace kvq {

namespace {

constexpr std::uint32_t kPiecePages = 512;  // of a block table, changed in one transaction

}  // namespace

// Places [from, to) of the block table change from `before` to `after`; the table holds the pages of both. Walks from
// the end, so that of pages released together the newest is the first to be evicted, and children come before parents.
void StoreState::rehold(const SequenceRecord& before, const SequenceRecord& after, SequenceIndex s, std::uint32_t from,
                        std::uint32_t to) {
  Tenant& t = tenant_of(before.tenant);
  for (std::uint32_t i = to; i-- > from;) {
    const Hold was = hold_of(before, i, before.pages, window()), is = hold_of(after, i, after.pages, window());
    if (was == is) continue;
    const PageId page = sequences_->page(s, i);
    if (was.running != is.running || was.reference != is.reference) t.pages->touch(page, now_ms_);
    t.pages->change_hold(page, was, is);
    if (was.reference && !is.reference && t.pages->use(page).references == 0) released(t, page);
  }
}

bool StoreState::append_page(SequenceIndex s, PageId page) {
  const SequenceRecord before = sequences_->record(s);
  if (!sequences_->append(s, page)) return false;
  const SequenceRecord& after = sequences_->record(s);
  const std::uint32_t newest = after.pages - std::min(after.pages, config_.window_pages + 1);
  rehold(before, after, s, std::max(newest, before.first_kept), after.pages);
  return true;
}

// In pieces that a transaction holds; all but the last are committed here.
void StoreState::cut_sequence(SequenceIndex s, std::uint32_t pages) {
  while (sequences_->record(s).pages > pages + kPiecePages) {
    cut_piece(s, sequences_->record(s).pages - kPiecePages);
    commit();
  }
  cut_piece(s, pages);
}

void StoreState::cut_piece(SequenceIndex s, std::uint32_t pages) {
  const SequenceRecord before = sequences_->record(s);
  SequenceRecord after = before;
  after.pages = pages;
  after.first_kept = std::min(before.first_kept, pages);
  const std::uint32_t window_start = pages - std::min(pages, config_.window_pages);
  rehold(before, after, s, std::max(window_start, before.first_kept), before.pages);
  sequences_->cut(s, pages);
}

void StoreState::drop_before(SequenceIndex s, std::uint32_t index) {
  while (index > sequences_->record(s).first_kept + kPiecePages) {
    drop_piece(s, sequences_->record(s).first_kept + kPiecePages);
    commit();
  }
  drop_piece(s, index);
}

void StoreState::drop_piece(SequenceIndex s, std::uint32_t index) {
  const SequenceRecord before = sequences_->record(s);
  if (index <= before.first_kept) return;
  SequenceRecord after = before;
  after.first_kept = index;
  rehold(before, after, s, before.first_kept, index);
  sequences_->forget_before(s, index);
}

void StoreState::set_sequence_flags(SequenceIndex s, std::uint16_t flags) {
  const SequenceRecord before = sequences_->record(s);
  SequenceRecord after = before;
  after.flags = flags;
  rehold(before, after, s, before.first_kept, before.pages);
  sequences_->set_flags(s, flags);
}

void StoreState::end_sequence(Session& s, SequenceIndex sequence) {
  const std::uint32_t number = raw(sequences_->record(sequence).id);
  cut_sequence(sequence, 0);
  sequences_->destroy(sequence);
  s.sequences.erase(number);
  kill_point(KillPoint::sequence_ended);
}

std::optional<SequenceIndex> StoreState::find_sequence(const Session& s, SequenceId id) const {
  const auto found = s.sequences.find(raw(id));
  if (found == s.sequences.end()) return std::nullopt;
  return found->second;
}

// Nothing when the id is out of range or in use, or the table is full.
std::optional<SequenceIndex> StoreState::new_sequence(Session& s, SequenceId id, std::uint16_t flags) {
  if (raw(id) == 0 || raw(id) >= kMaxSequences || s.sequences.contains(raw(id))) return std::nullopt;
  if (keeps_dense(s)) flags |= kSequenceFloorDense;
  if (!s.connected) flags |= kSequenceImmobile;
  const auto sequence = sequences_->create(s.id, id, s.request.tenant, flags, now_ms_);
  if (sequence) s.sequences.emplace(raw(id), *sequence);
  return sequence;
}

// Checks the chain from its end to its root before it takes any hold.
Result<std::vector<PageId>> StoreState::attach(SessionId id, SequenceId sequence, PageId last_page,
                                               std::uint16_t generation, std::uint32_t pages, const Key& key,
                                               bool floor_dense, std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  Session* s = find_session(id);
  if (s == nullptr) return Error{Errc::stale_id, 0, "no such session"};
  if (!s->ready || !s->connected) return Error{Errc::invalid_argument, 0, "the session has not mapped all slabs yet"};
  Tenant& t = tenant_of(s->request.tenant);
  if (const auto known = find_sequence(*s, sequence)) {
    // A client whose connection broke before the answer asks again.
    if (auto same = same_attach(t, *known, last_page, generation, pages, key)) return *same;
    return Error{Errc::invalid_argument, 0, "the sequence id is in use"};
  }
  if (draining_) return Error{Errc::draining, 0, "the daemon is draining"};
  if (raw(sequence) == 0 || raw(sequence) >= kMaxSequences) {
    return Error{Errc::invalid_argument, 0, "the sequence id is out of range"};
  }
  ++t.counts.lookups;
  const Error stale{Errc::stale_id, 0, "the prefix is not cached under this page any more"};
  if (pages == 0 || !t.pages->names_page(last_page)) return stale;
  const PageRecord& last = t.pages->record(last_page);
  if (last.generation != generation || (last.flags & kPageIndexed) == 0 || last.key != key) return stale;
  const bool dense_only = floor_dense || keeps_dense(*s);
  std::vector<PageId> chain(pages);
  PageId page = last_page;
  for (std::uint32_t i = pages; i-- > 0; page = t.pages->record(page).parent) {
    if (page == kNullPage) return stale;  // the chain is shorter
    const PageRecord& r = t.pages->record(page);
    if (r.model != s->model) return stale;
    if (dense_only && (r.format != Format::dense || (r.flags & kPageTurnsCold) != 0)) {
      return Error{Errc::stale_id, 0, "the prefix is quantized, which this sequence does not take"};
    }
    chain[i] = page;
  }
  if (page != kNullPage) return stale;  // it is longer
  if (sequences_->free_chunks() < pages / kChunkPages + 1)
    return Error{Errc::limit_reached, 0, "block tables are full"};
  const std::uint16_t flags = static_cast<std::uint16_t>(kSequenceRunning | (floor_dense ? kSequenceFloorDense : 0));
  const std::optional<SequenceIndex> made = new_sequence(*s, sequence, flags);
  if (!made) return Error{Errc::limit_reached, 0, "max_sequences are open"};
  const SequenceRecord before = sequences_->record(*made);
  for (PageId p : chain) KVQ_ASSERT(sequences_->append(*made, p));
  rehold(before, sequences_->record(*made), *made, 0, pages);
  sequences_->commit(*made, std::uint64_t{pages} * kPageTokens, now_ms_);
  commit();
  kill_point(KillPoint::attach_committed);
  ++t.counts.hits;
  for (const PageId p : chain) ++t.counts.hit_pages[static_cast<std::size_t>(t.pages->record(p).format)];
  return chain;
}

// The pages of a sequence that is still as attach() made it, or nothing.
std::optional<std::vector<PageId>> StoreState::same_attach(const Tenant& t, SequenceIndex sequence, PageId last_page,
                                                           std::uint16_t generation, std::uint32_t pages,
                                                           const Key& key) const {
  const SequenceRecord& q = sequences_->record(sequence);
  if (pages == 0 || q.pages != pages || q.first_kept != 0 || q.tokens != std::uint64_t{pages} * kPageTokens) return {};
  const PageRecord& last = t.pages->record(sequences_->page(sequence, pages - 1));
  if (sequences_->page(sequence, pages - 1) != last_page || last.generation != generation || last.key != key) return {};
  std::vector<PageId> chain(pages);
  for (std::uint32_t i = 0; i < pages; ++i) chain[i] = sequences_->page(sequence, i);
  return chain;
}

Result<void> StoreState::resume(SessionId id, SequenceId sequence, std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  Session* s = find_session(id);
  if (s == nullptr) return Error{Errc::stale_id, 0, "no such session"};
  const std::optional<SequenceIndex> found = find_sequence(*s, sequence);
  if (!found) return Error{Errc::stale_id, 0, "no such sequence"};
  set_sequence_flags(*found, sequences_->record(*found).flags | kSequenceRunning);
  commit();
  return {};
}

}  // namespace kvq
