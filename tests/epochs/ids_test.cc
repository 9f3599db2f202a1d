// A page is given up while a step still carries its id: the id names nothing else until the step is over.
//
// Invariant: the session's `release` reaches the daemon through the real ring; the daemon retires the page with its
// place, and only when it is reaped the entry becomes free and the id is given out again, under a new generation.
#include "daemon/core/limbo.h"
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  entry_stays_until_reap,         // broken: the entry becomes free when the page is retired
  id_rests_with_its_place,        // broken: the id is given out again when the page is retired
  generation_changes_with_reuse,  // broken: the next page of this id has the generation of the last
};

constexpr std::uint64_t kContent = 7, kOther = 99;

struct World {
  Word epoch{"epoch", 1}, revoked{"revoked"};
  Word entry{"entry", pack_entry({1, Format::dense, EntryState::sealed, 0})};
  Cell<std::uint64_t> place{"place X", kContent};
  Slot step[1];
  Ring<std::uint64_t, 2> commands, magazine;
};

// One step with the page in its block table, which is given up after `begin`: the kernels of the step run on. Then the
// session may get the same id for a new page.
void client(World& w) {
  std::uint64_t produced = 0, consumed = 0;
  begin_step<M>(w.step[0], 1, w.epoch, w.revoked);
  ring_push<M>(w.commands, produced, std::uint64_t{1});
  const Entry e = unpack_entry(load_entry<M>(w.entry));
  expect(e.state == EntryState::sealed, "a step meets an entry that is free or another page's");
  expect(M::read(w.place) == kContent, "a step reads the bytes of another page");
  end_step<M>(w.step[0], 1);
  if (ring_produced<M>(w.magazine) == 0) return;
  expect(ring_pop<M>(w.magazine, consumed) != e.generation, "two pages of one name");
}

void daemon(World& w, Rule broken) {
  Limbo limbo;
  std::uint64_t produced = 0, consumed = 0, epoch = 1;
  const std::uint16_t next = broken == Rule::generation_changes_with_reuse ? 1 : 2;
  const auto give_out = [&] {
    publish_entry<M>(w.entry, pack_entry({next, Format::dense, EntryState::open, 0}));
    ring_push<M>(w.magazine, produced, std::uint64_t{next});
  };
  for (int tick = 0; tick < 3; ++tick) {
    if (consumed == 0 && ring_produced<M>(w.commands) == 1) {
      ring_pop<M>(w.commands, consumed);
      if (broken == Rule::entry_stays_until_reap)
        publish_entry<M>(w.entry, pack_entry({next, Format::none, EntryState::free, 0}));
      if (broken == Rule::id_rests_with_its_place) return give_out();
      limbo.retire({.slot = {}, .page = PageId{1}, .tag = Epoch{epoch}});
      advance_epoch<M>(w.epoch);
      ++epoch;
    }
    limbo.reap(oldest_open<M>(w.step, Epoch{epoch}), [&](const Retired&) {
      publish_entry<M>(w.entry, pack_entry({next, Format::none, EntryState::free, 0}));
      M::write(w.place, kOther);
      give_out();
    });
  }
}

Machine::Scenario release(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("client", [w] { client(*w); });
    m.thread("daemon", [w, broken] { daemon(*w, broken); });
  };
}

TEST(Ids, AStepAgainstTheReuseOfAPageThatItCarries) { holds(release()); }

TEST(IdRules, Fail) {
  fails("an entry that is free", release(Rule::entry_stays_until_reap));
  fails("another page's", release(Rule::id_rests_with_its_place));
  fails("two pages of one name", release(Rule::generation_changes_with_reuse));
}

TEST(IdsWithout, TheEndsOrderFail) {
  fails("may still read it", release(), Site::step_ended);
  fails("may still read it", release(), Site::end_scanned);
}

}  // namespace
}  // namespace kvq::model
