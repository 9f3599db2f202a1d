// A page moves while steps read it: no step sees a slot that was given to another page.
//
// Invariant: the reader and the daemon below run the code of kvq/step_protocol.h and daemon/core/limbo.h; only what
// lies between those calls is written here, as daemon/store_transcode.cc and store_pages.cc have it. Each Rule breaks
// one line.
#include "daemon/core/limbo.h"
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  // the daemon's
  slot_rests_in_limbo,       // broken: it is reused as soon as the new entry is out
  publish_before_advance,    // broken: the entry follows the epoch
  advance_before_scan,       // broken: the steps are scanned first
  tag_is_the_present_epoch,  // broken: one less
  every_slot_is_scanned,     // broken: only the first
  // the reader's
  begin_before_lookup,  // broken: the entry is loaded before the step begins
  lookup_in_each_step,  // broken: the second step uses what the first one loaded
  read_before_end,      // broken: the step ends first
};

constexpr std::uint64_t kContent = 7, kOther = 99;

std::uint64_t entry_of(std::uint32_t place) {
  return pack_entry({1, Format::dense, EntryState::sealed, place * kOffsetUnitBytes});
}

template <std::uint32_t Slots, std::uint32_t Readers>
struct World {
  Word epoch{"epoch", 1}, entry{"entry", entry_of(0)}, revoked{"revoked"};
  Cell<std::uint64_t> place[3] = {Cell<std::uint64_t>{"place X", kContent}, Cell<std::uint64_t>{"place Y"},
                                  Cell<std::uint64_t>{"place Z"}};
  Slot step[Readers][Slots];
};

struct Shape {
  std::uint32_t steps = 1, moves = 1, ticks = 2;
  Rule broken = Rule::kept;
};

template <typename W>
void read(W& w, std::uint64_t packed) {
  const Entry e = unpack_entry(packed);
  expect(M::read(w.place[e.offset_bytes / kOffsetUnitBytes]) == kContent, "a step reads the bytes of another page");
}

template <typename W>
void reader(W& w, std::size_t session, const Shape& shape) {
  auto& slots = w.step[session];
  std::uint64_t packed = 0;
  for (std::uint64_t serial = 1; serial <= shape.steps; ++serial) {
    Slot& slot = slots[serial % std::size(slots)];
    if (shape.broken == Rule::begin_before_lookup) packed = load_entry<M>(w.entry);
    begin_step<M>(slot, serial, w.epoch, w.revoked);
    if (shape.broken != Rule::begin_before_lookup && (serial == 1 || shape.broken != Rule::lookup_in_each_step)) {
      packed = load_entry<M>(w.entry);
    }
    if (shape.broken == Rule::read_before_end) end_step<M>(slot, serial);
    read(w, packed);
    if (shape.broken != Rule::read_before_end) end_step<M>(slot, serial);
  }
}

template <typename W>
Epoch scan(const W& w, Epoch current, Rule broken) {
  Epoch oldest{raw(current) + 1};
  for (const auto& session : w.step) {
    if (broken == Rule::every_slot_is_scanned) {
      const Slot(&first)[1] = reinterpret_cast<const Slot(&)[1]>(session);
      oldest = std::min(oldest, oldest_open<M>(first, current));
    } else {
      oldest = std::min(oldest, oldest_open<M>(session, current));
    }
  }
  return oldest;
}

template <typename W>
void daemon(W& w, const Shape& shape) {
  Limbo limbo;
  std::uint64_t epoch = 1;
  const auto reuse = [&](const Retired& item) { M::write(w.place[raw(item.slot.slot)], kOther); };
  for (std::uint32_t tick = 0; tick < shape.ticks; ++tick) {
    if (tick < shape.moves) {
      const SlotRef from{SlabId{0}, SlotIndex{tick}};
      M::write(w.place[tick + 1], kContent);
      if (shape.broken != Rule::publish_before_advance) publish_entry<M>(w.entry, entry_of(tick + 1));
      if (shape.broken == Rule::slot_rests_in_limbo) {
        reuse({.slot = from});
        return;
      }
      limbo.retire({.slot = from, .tag = Epoch{epoch - (shape.broken == Rule::tag_is_the_present_epoch ? 1 : 0)}});
      const Epoch early = shape.broken == Rule::advance_before_scan ? scan(w, Epoch{epoch}, shape.broken) : Epoch{0};
      advance_epoch<M>(w.epoch);
      ++epoch;
      if (shape.broken == Rule::publish_before_advance) publish_entry<M>(w.entry, entry_of(tick + 1));
      if (shape.broken == Rule::advance_before_scan) limbo.reap(early, reuse);
    }
    if (shape.broken != Rule::advance_before_scan) limbo.reap(scan(w, Epoch{epoch}, shape.broken), reuse);
  }
}

template <std::uint32_t Slots, std::uint32_t Readers>
Machine::Scenario move(const Shape& shape) {
  return [shape](Machine& m) {
    const auto w = std::make_shared<World<Slots, Readers>>();
    for (std::size_t i = 0; i < Readers; ++i) {
      m.thread(i == 0 ? "reader" : "reader 2", [w, i, shape] { reader(*w, i, shape); });
    }
    m.thread("daemon", [w, shape] { daemon(*w, shape); });
  };
}

constexpr char kRace[] = "race: daemon writes place X while reader may still read it";

TEST(Moves, AStepAgainstAMove) { holds(move<1, 1>({.steps = 1, .moves = 1})); }
TEST(Moves, TwoStepsAgainstAMove) { holds(move<2, 1>({.steps = 2, .moves = 1})); }
TEST(Moves, TwoStepsOfOneSlotAgainstAMove) { holds(move<1, 1>({.steps = 2, .moves = 1})); }
TEST(Moves, AStepAgainstTwoMoves) { holds(move<1, 1>({.steps = 1, .moves = 2, .ticks = 3})); }
TEST(Moves, TwoStepsAgainstTwoMoves) { holds(move<2, 1>({.steps = 2, .moves = 2, .ticks = 3})); }
TEST(Moves, TwoStepsOfOneSlotAgainstTwoMoves) { holds(move<1, 1>({.steps = 2, .moves = 2, .ticks = 3})); }
// KVQ_EPOCHS_LONG=1: two steps each, some seven million executions.
TEST(Moves, TwoReadersAgainstAMove) {
  holds(move<1, 2>({.steps = std::getenv("KVQ_EPOCHS_LONG") != nullptr ? 2u : 1u, .moves = 1}));
}

TEST(Moves, ThreeStepsAgainstTwoMoves) { holds(move<2, 1>({.steps = 3, .moves = 2, .ticks = 3})); }
TEST(Moves, ThreeStepsOfOneSlotAgainstTwoMoves) { holds(move<1, 1>({.steps = 3, .moves = 2, .ticks = 4})); }
TEST(Moves, TwoReadersAgainstTwoMoves) { holds(move<1, 2>({.steps = 1, .moves = 2, .ticks = 2})); }

TEST(Search, LeavingOutKnownStatesLosesNoEndOfAMove) {
  const Machine::Scenario scenario = move<1, 1>({.steps = 1, .moves = 1, .ticks = 1});
  const Report some = Machine::explore(scenario), all = Machine::explore(scenario, Site::plain, true);
  std::printf("%llu executions instead of %llu\n", static_cast<unsigned long long>(some.executions),
              static_cast<unsigned long long>(all.executions));
  EXPECT_EQ(some.ends, all.ends);
}

class MoveWithout : public testing::TestWithParam<Site> {};
TEST_P(MoveWithout, Fails) { fails("race", move<1, 1>({.steps = 2}), GetParam()); }
INSTANTIATE_TEST_SUITE_P(, MoveWithout, testing::ValuesIn(kMoveSites), site_of);

class MoveWithoutSpare : public testing::TestWithParam<Site> {};
TEST_P(MoveWithoutSpare, Holds) {
  holds(move<1, 1>({.steps = 2, .moves = 2, .ticks = 3}), GetParam());
  holds(move<2, 1>({.steps = 2, .moves = 1}), GetParam());
}
INSTANTIATE_TEST_SUITE_P(, MoveWithoutSpare, testing::ValuesIn(kSpareSites), site_of);

TEST(MoveRules, Fail) {
  for (const Rule rule :
       {Rule::slot_rests_in_limbo, Rule::publish_before_advance, Rule::advance_before_scan,
        Rule::tag_is_the_present_epoch, Rule::begin_before_lookup, Rule::lookup_in_each_step, Rule::read_before_end}) {
    fails("place X", move<1, 1>({.steps = 2, .broken = rule}));
  }
  fails(kRace, move<2, 1>({.steps = 1, .broken = Rule::every_slot_is_scanned}));
}

}  // namespace
}  // namespace kvq::model
