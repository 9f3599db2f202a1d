// A page is sealed after the step that wrote it: who reads it as sealed sees every byte.
//
// Invariant: the `seal` command may reach the daemon before the step is over, as it does when kernels run on.
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  step_is_over,  // broken: the command alone seals the page
};

constexpr std::uint64_t kContent = 7;

std::uint64_t entry_in(EntryState state) { return pack_entry({1, Format::dense, state, 0}); }

struct World {
  Word epoch{"epoch", 1}, entry{"entry", entry_in(EntryState::open)}, revoked{"revoked"};
  Cell<std::uint64_t> half[2] = {Cell<std::uint64_t>{"first half"}, Cell<std::uint64_t>{"second half"}};
  Slot step[1];
  Ring<std::uint64_t, 2> commands;
};

Machine::Scenario seal(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("writer", [w] {
      std::uint64_t produced = 0;
      begin_step<M>(w->step[0], 1, w->epoch, w->revoked);
      M::write(w->half[0], kContent);
      ring_push<M>(w->commands, produced, std::uint64_t{1});  // seal, once step 1 has ended
      M::write(w->half[1], kContent);
      end_step<M>(w->step[0], 1);
    });
    m.thread("daemon", [w, broken] {
      std::uint64_t consumed = 0, serial = 0;
      for (int tick = 0; tick < 3; ++tick) {
        if (consumed == 0 && ring_produced<M>(w->commands) == 1) serial = ring_pop<M>(w->commands, consumed);
        if (serial == 0 || (broken != Rule::step_is_over && !step_ended<M>(w->step[0], serial))) continue;
        return publish_entry<M>(w->entry, entry_in(EntryState::sealed));
      }
    });
    m.thread("reader", [w] {
      if (load_entry<M>(w->entry) != entry_in(EntryState::sealed)) return;
      for (const auto& half : w->half) expect(M::read(half) == kContent, "a sealed page lacks bytes");
    });
  };
}

TEST(Seals, AReaderOfASealedPageSeesAllThatItsStepWrote) { holds(seal()); }

class SealWithout : public testing::TestWithParam<Site> {};
TEST_P(SealWithout, Fails) { fails("race: reader reads", seal(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(, SealWithout, testing::ValuesIn(kSealSites), site_of);

TEST(SealRules, APageThatIsSealedBeforeItsStepHasEndedFails) { fails("half", seal(Rule::step_is_over)); }

}  // namespace
}  // namespace kvq::model
