// A step that another side ends: its session begins it, a device reads the pages and stores `ended`.
//
// Invariant: the session takes the slot for its next step only when it has seen the end, and so passes on to the scan
// that the device's reads are over. The device's store stands for a release that all processes of the node can see.
#include "daemon/core/limbo.h"
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  slot_is_free_when_begun,  // broken: the next step takes the slot of one that is open
};

constexpr std::uint64_t kContent = 7, kOther = 99;

std::uint64_t entry_of(std::uint32_t place) {
  return pack_entry({1, Format::dense, EntryState::sealed, place * kOffsetUnitBytes});
}

struct World {
  Word epoch{"epoch", 1}, entry{"entry", entry_of(0)}, revoked{"revoked"}, launched{"launched"};
  Cell<std::uint64_t> place[2] = {Cell<std::uint64_t>{"place X", kContent}, Cell<std::uint64_t>{"place Y"}};
  Slot step[1];
};

Machine::Scenario launch(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("session", [w, broken] {
      begin_step<M>(w->step[0], 1, w->epoch, w->revoked);
      M::store(w->launched, 1, std::memory_order_release, Site::plain);
      if (broken == Rule::kept && is_open<M>(w->step[0])) return;
      begin_step<M>(w->step[0], 2, w->epoch, w->revoked);  // and goes on for longer than this scenario
    });
    m.thread("device", [w] {
      if (M::load(w->launched, std::memory_order_acquire, Site::plain) == 0) return;
      const Entry e = unpack_entry(load_entry<M>(w->entry));
      expect(M::read(w->place[e.offset_bytes / kOffsetUnitBytes]) == kContent, "a step reads another page");
      end_step<M>(w->step[0], 1);
    });
    m.thread("daemon", [w] {
      Limbo limbo;
      M::write(w->place[1], kContent);
      publish_entry<M>(w->entry, entry_of(1));
      limbo.retire({.slot = {}, .tag = Epoch{1}});
      advance_epoch<M>(w->epoch);
      for (int tick = 0; tick < 2; ++tick) {
        limbo.reap(oldest_open<M>(w->step, Epoch{2}), [&](const Retired&) { M::write(w->place[0], kOther); });
      }
    });
  };
}

TEST(Devices, AStepThatIsEndedByAnotherSide) { holds(launch()); }
TEST(DeviceRules, ASlotThatIsTakenWhileItsStepIsOpenFails) {
  fails("race: daemon writes place X while device may still read it", launch(Rule::slot_is_free_when_begun));
}

class DeviceWithout : public testing::TestWithParam<Site> {};
TEST_P(DeviceWithout, Fails) { fails("race", launch(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(, DeviceWithout, testing::ValuesIn(kDeviceSites), site_of);

}  // namespace
}  // namespace kvq::model
