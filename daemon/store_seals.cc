// Seals: a complete page becomes immutable once the step that writes it is over, and gets its name in the prefix table.
//
// Invariant: only a page whose writing step is known to have ended is named by its key; what a process left half
// written when it died is never found by anyone else.
#include <algorithm>

#include "daemon/store_state.h"

namespace kvq {

// `complete`: the step ended by itself. A dead session's steps are over too, but may have been cut short.
bool StoreState::step_is_over(const PendingSeal& seal, bool* complete) const {
  const Session* s = find_session(seal.stepper);
  *complete = seal.serial == 0 || (s != nullptr && s->segment.step_ended(seal.serial));
  return *complete || s == nullptr;
}

// In order, so that a page's predecessor has its name first. A seal whose step still runs holds up only what follows it
// in the same sequence.
void StoreState::settle_seals(Tenant& t) {
  std::deque<PendingSeal> waiting;
  std::vector<SequenceIndex> held_up;
  for (const PendingSeal& seal : t.seals) {
    const PageRecord& r = t.pages->record(seal.page);
    if (r.generation != seal.generation || r.state != PageState::sealing) continue;  // given up meanwhile
    bool complete = false;
    const bool held = std::find(held_up.begin(), held_up.end(), seal.sequence) != held_up.end();
    if (held || !step_is_over(seal, &complete)) {
      if (!held) held_up.push_back(seal.sequence);
      waiting.push_back(seal);
      continue;
    }
    seal_page(t, seal, complete);
  }
  t.seals = std::move(waiting);
}

bool StoreState::seal_page(Tenant& t, const PendingSeal& seal, bool complete) {
  bool indexed = false;
  if (complete && (seal.flags & kPrivate) == 0) {
    t.pages->set_key(seal.page, seal.key);
    // Its place in its sequence names its predecessor; the sequence may have ended and left the page to a fork.
    const SequenceRecord& q = sequences_->record(seal.sequence);
    const bool placed = (q.flags & kSequenceLive) != 0 && q.tenant == t.id && seal.index < q.pages &&
                        sequences_->page(seal.sequence, seal.index) == seal.page;
    PageId parent = kNullPage;
    if (placed && seal.index > 0) {
      const PageId previous = sequences_->page(seal.sequence, seal.index - 1);
      if (previous != kNullPage) {
        const PageRecord& p = t.pages->record(previous);
        parent = (p.flags & kPageIndexed) != 0  ? previous
                 : (p.flags & kPageHasKey) != 0 ? t.prefix->find(p.key)
                                                : kNullPage;
      }
    }
    if (placed && (seal.index == 0 || parent != kNullPage)) indexed = t.prefix->insert(seal.page, parent);
  }
  t.pages->move(seal.page, PageState::sealed);
  const PageRecord& r = t.pages->record(seal.page);
  t.directory.publish(seal.page, {r.generation, r.format, EntryState::sealed, pool_.offset_bytes({r.slab, r.slot})});
  return indexed;
}

}  // namespace kvq
