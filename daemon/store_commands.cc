// Commands: what a client writes into its ring, checked field by field before anything changes.
//
// Invariant: a command acts only on sequences and pages of the session whose ring it came from; whatever its bytes, it
// is either carried out whole or refused and counted, and the ring moves on in the same transaction. Those that may
// commit in pieces (truncate, drop_before, release) do no harm when a next daemon carries them out again.
#include <algorithm>

#include "daemon/store_state.h"

namespace kvq {

std::uint32_t StoreState::drain_commands(SessionId id, std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  Session* s = find_session(id);
  if (s == nullptr || (s->record->flags & kSessionEvicted) != 0) return 0;
  std::uint32_t count = 0;
  // One ring's worth at most: a client that keeps writing must not keep the loop.
  while (count < kCommandSlots) {
    const std::optional<Command> command = s->segment.next_command();
    if (!command) break;
    ++count;
    const bool carried_out = apply(*s, *command);
    save(*s, s->record->counts);
    s->segment.take_command();
    if (!carried_out) {
      ++counts_.commands_refused;
      save(*s, s->record->refused);
      s->segment.words().commands_refused.store(++s->record->refused, std::memory_order_relaxed);
      s->changed = true;
    }
    kill_point(KillPoint::command_applied);
    commit();
    kill_point(KillPoint::command_committed);
    s->segment.show_commands();
  }
  if (count > 0) settle_seals(tenant_of(s->request.tenant));
  if (s->segment.broken() && !std::exchange(s->told_broken, true)) {
    log("event=session_broken session=" + std::to_string(raw(id)) + " why=\"ring indices that no client writes\"");
  }
  return count;
}

bool StoreState::apply(Session& s, const Command& c) {
  switch (c.kind) {
    case CommandKind::open:
      return open_sequence(s, c);
    case CommandKind::take:
      return take_page(s, c);
    case CommandKind::seal:
      return seal_command(s, c);
    case CommandKind::fork:
      return fork_sequence(s, c);
    case CommandKind::return_credit:
      return return_credit(s, c);
    case CommandKind::release: {
      const auto sequence = find_sequence(s, c.sequence);
      if (!sequence) return false;
      // A sequence that was finished and released within one drain leaves its pages cached like any other.
      settle_seals(tenant_of(s.request.tenant));
      end_sequence(s, *sequence);
      return true;
    }
    default: {
      const auto sequence = find_sequence(s, c.sequence);
      return sequence && apply_to_sequence(c, *sequence);
    }
  }
}

bool StoreState::apply_to_sequence(const Command& c, SequenceIndex sequence) {
  const SequenceRecord& r = sequences_->record(sequence);
  switch (c.kind) {
    case CommandKind::commit:
      if (c.index > std::uint64_t{r.pages} * kPageTokens) return false;
      sequences_->commit(sequence, c.index, now_ms_);
      return true;
    case CommandKind::truncate:
      if (c.index > r.pages) return false;
      cut_sequence(sequence, c.index);
      return true;
    case CommandKind::drop_before:
      if (c.index > r.pages) return false;
      drop_before(sequence, c.index);
      return true;
    case CommandKind::park:
      set_sequence_flags(sequence, r.flags & static_cast<std::uint16_t>(~kSequenceRunning));
      return true;
    default:
      return false;
  }
}

bool StoreState::open_sequence(Session& s, const Command& c) {
  const std::uint16_t floor = (c.flags & kFormatFloorDense) != 0 ? kSequenceFloorDense : 0;
  return new_sequence(s, c.sequence, static_cast<std::uint16_t>(kSequenceRunning | floor)).has_value();
}

bool StoreState::take_page(Session& s, const Command& c) {
  Tenant& t = tenant_of(s.request.tenant);
  const auto sequence = find_sequence(s, c.sequence);
  if (!sequence || !t.pages->names_page(c.page)) return false;
  const SequenceRecord& q = sequences_->record(*sequence);
  const PageRecord& r = t.pages->record(c.page);
  if ((q.flags & kSequenceRunning) == 0 || c.index != q.pages || !sequences_->has_room(*sequence)) return false;
  if (r.state != PageState::credit || r.owner != s.id || r.generation != c.generation) return false;
  t.pages->move(c.page, PageState::open);
  --s.credits;
  KVQ_ASSERT(append_page(*sequence, c.page));
  return true;
}

bool StoreState::seal_command(Session& s, const Command& c) {
  Tenant& t = tenant_of(s.request.tenant);
  const auto sequence = find_sequence(s, c.sequence);
  if (!sequence || !t.pages->names_page(c.page)) return false;
  const SequenceRecord& q = sequences_->record(*sequence);
  const PageRecord& r = t.pages->record(c.page);
  if (c.index >= q.pages || c.index < q.first_kept || sequences_->page(*sequence, c.index) != c.page) return false;
  if (r.state != PageState::open || r.owner != s.id || r.generation != c.generation) return false;
  const SessionId stepper = c.argument == 0 ? s.id : SessionId{c.argument};
  if (raw(stepper) > tables_.root_record().last_session) return false;
  if (const Session* other = find_session(stepper); other != nullptr && other->request.tenant != t.id) return false;
  PageTable::Seal seal{.session = stepper,
                       .serial = c.serial,
                       .sequence = raw(*sequence),
                       .index = c.index,
                       .is_private = (c.flags & kPrivate) != 0};
  std::copy(std::begin(c.key), std::end(c.key), seal.key.begin());
  t.pages->set_seal(c.page, seal);
  t.seals.push_back({c.page, c.generation});
  const std::uint64_t tokens = (std::uint64_t{c.index} + 1) * kPageTokens;  // a full page is final: its tokens are too
  sequences_->commit(*sequence, std::max(q.tokens, tokens), now_ms_);
  return true;
}

bool StoreState::fork_sequence(Session& s, const Command& c) {
  Tenant& t = tenant_of(s.request.tenant);
  const auto source = find_sequence(s, SequenceId{c.argument});
  if (!source) return false;
  const SequenceRecord from = sequences_->record(*source);
  if (c.index > from.pages || sequences_->free_chunks() < c.index / kChunkPages + 1) return false;
  for (std::uint32_t i = from.first_kept; i < c.index; ++i) {
    const PageState state = t.pages->record(sequences_->page(*source, i)).state;
    if (state == PageState::open) return false;  // only complete pages are shared
  }
  const std::uint16_t floor = (c.flags & kFormatFloorDense) != 0 ? kSequenceFloorDense : 0;
  const std::uint16_t inherited = from.flags & kSequenceFloorDense;
  const auto made = new_sequence(s, c.sequence, static_cast<std::uint16_t>(kSequenceRunning | floor | inherited));
  if (!made) return false;
  const SequenceRecord before = sequences_->record(*made);
  for (std::uint32_t i = 0; i < c.index; ++i) {
    KVQ_ASSERT(sequences_->append(*made, i < from.first_kept ? kNullPage : sequences_->page(*source, i)));
  }
  sequences_->forget_before(*made, std::min(from.first_kept, c.index));
  rehold(before, sequences_->record(*made), *made, std::min(from.first_kept, c.index), c.index);
  return true;
}

}  // namespace kvq
