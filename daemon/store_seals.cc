// Seals: a complete page becomes immutable once the step that writes it is over, and gets its name in the prefix table.
//
// Invariant: only a page whose writing step is known to have ended is named by its key; what a process left half
// written when it died is never found by anyone else.
#include <algorithm>

#include "daemon/store_state.h"

namespace kvq {

// `complete`: the step ended by itself. A dead session's steps are over too, but may have been cut short, as may those
// of a client that lost its GPU context.
bool StoreState::step_is_over(const PageRecord& page, bool* complete) const {
  const Session* s = find_session(page.seal_session);
  const bool ended = page.seal_serial == 0 || (s != nullptr && s->segment.step_ended(page.seal_serial));
  *complete = ended && (s == nullptr || !s->segment.step_cut_short(page.seal_serial));
  return ended || s == nullptr;
}

// In order, so that a page's predecessor has its name first. A seal whose step still runs holds up only what follows it
// in the same sequence.
void StoreState::settle_seals(Tenant& t) {
  std::deque<PendingSeal> waiting;
  std::vector<std::uint32_t> held_up;
  for (const PendingSeal& seal : t.seals) {
    const PageRecord& r = t.pages->record(seal.page);
    if (r.generation != seal.generation || r.state != PageState::sealing) continue;  // given up meanwhile
    bool complete = false;
    const bool held = std::find(held_up.begin(), held_up.end(), r.seal_sequence) != held_up.end();
    if (held || !step_is_over(r, &complete)) {
      if (!held) held_up.push_back(r.seal_sequence);
      waiting.push_back(seal);
      continue;
    }
    seal_page(t, seal.page, complete);
  }
  t.seals = std::move(waiting);
}

void StoreState::seal_page(Tenant& t, PageId page, bool complete) {
  const PageRecord& r = t.pages->record(page);
  if (complete && (r.flags & kPageSealPrivate) == 0) {
    t.pages->confirm_key(page);
    // Its place in its sequence names its predecessor; the sequence may have ended and left the page to a fork.
    const SequenceIndex sequence{r.seal_sequence};
    const SequenceRecord& q = sequences_->record(sequence);
    const bool placed = (q.flags & kSequenceLive) != 0 && q.tenant == t.id && r.seal_index < q.pages &&
                        sequences_->page(sequence, r.seal_index) == page;
    PageId parent = kNullPage;
    if (placed && r.seal_index > 0) {
      const PageId previous = sequences_->page(sequence, r.seal_index - 1);
      if (previous != kNullPage) {
        const PageRecord& p = t.pages->record(previous);
        parent = (p.flags & kPageIndexed) != 0  ? previous
                 : (p.flags & kPageHasKey) != 0 ? t.prefix->find(p.key)
                                                : kNullPage;
      }
    }
    if (placed && (r.seal_index == 0 || parent != kNullPage)) t.prefix->insert(page, parent);
  }
  t.pages->move(page, PageState::sealed);
  commit();
  kill_point(KillPoint::seal_committed);
  publish(t, page, {r.generation, r.format, EntryState::sealed, pool_.offset_bytes({r.slab, r.slot})});
  t.unchecked.emplace_back(page, r.generation);
  ++t.counts.sealed_pages;
}

}  // namespace kvq
