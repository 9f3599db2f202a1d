// A place that a step could read comes to another session as a credit, which that session writes.
//
// Invariant: between the last read of the old page and the first write of the new one lie the step's end, the scan, the
// entry and the magazine, so the writer needs to know nothing of steps.
#include "daemon/core/limbo.h"
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  reaped_before_given,  // broken: the place is a credit as soon as its page has moved
};

constexpr std::uint64_t kContent = 7, kOther = 99;

std::uint64_t entry_of(std::uint32_t place, EntryState state) {
  return pack_entry({1, Format::dense, state, place * kOffsetUnitBytes});
}

struct World {
  Word epoch{"epoch", 1}, revoked{"revoked"};
  Word entry{"entry", entry_of(0, EntryState::sealed)}, new_entry{"new page's entry"};
  Cell<std::uint64_t> place[2] = {Cell<std::uint64_t>{"place X", kContent}, Cell<std::uint64_t>{"place Y"}};
  Slot step[1];
  Ring<std::uint64_t, 2> magazine;
};

Machine::Scenario credit(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("reader", [w] {
      begin_step<M>(w->step[0], 1, w->epoch, w->revoked);
      const Entry e = unpack_entry(load_entry<M>(w->entry));
      expect(M::read(w->place[e.offset_bytes / kOffsetUnitBytes]) == kContent, "a step reads another session's page");
      end_step<M>(w->step[0], 1);
    });
    m.thread("daemon", [w, broken] {
      Limbo limbo;
      std::uint64_t produced = 0;
      const auto give = [&] {
        publish_entry<M>(w->new_entry, entry_of(0, EntryState::open));
        ring_push<M>(w->magazine, produced, std::uint64_t{2});
      };
      M::write(w->place[1], kContent);
      publish_entry<M>(w->entry, entry_of(1, EntryState::sealed));
      if (broken == Rule::reaped_before_given) return give();
      limbo.retire({.slot = {}, .tag = Epoch{1}});
      advance_epoch<M>(w->epoch);
      for (int tick = 0; tick < 2; ++tick)
        limbo.reap(oldest_open<M>(w->step, Epoch{2}), [&](const Retired&) { give(); });
    });
    m.thread("writer", [w] {
      std::uint64_t consumed = 0;
      if (ring_produced<M>(w->magazine) == 0) return;
      expect(ring_pop<M>(w->magazine, consumed) == 2, "a credit is torn");
      const Entry e = unpack_entry(load_entry<M>(w->new_entry));
      expect(e.state == EntryState::open, "a credit comes before its entry");
      M::write(w->place[e.offset_bytes / kOffsetUnitBytes], kOther);
    });
  };
}

TEST(Credits, APlaceThatAStepCouldReadIsWrittenByAnotherSession) { holds(credit()); }

TEST(CreditRules, APlaceThatIsGivenBeforeItIsReapedFails) {
  fails("writer writes place X while reader may still read it", credit(Rule::reaped_before_given));
}

class CreditWithout : public testing::TestWithParam<Site> {};
TEST_P(CreditWithout, Fails) { fails("race", credit(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(, CreditWithout, testing::ValuesIn(kCreditSites), site_of);

}  // namespace
}  // namespace kvq::model
