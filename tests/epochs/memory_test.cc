// The model's memory against the textbook: what C++ allows is found, what it forbids is not.
//
// Invariant: each shape is tried both ways, so a memory that is too strong fails here as one that is too weak does.
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed, kAcquire = std::memory_order_acquire,
               kRelease = std::memory_order_release, kSeqCst = std::memory_order_seq_cst;
using M = ModelMemory;
constexpr Site kPlain = Site::plain;

// Two sides store, fence and load the other's word; `seen` gets what both saw.
Machine::Scenario store_load(std::memory_order fence) {
  return [fence](Machine& m) {
    struct World {
      Word x{"x"}, y{"y"};
      Cell<std::uint64_t> a{"a"}, b{"b"};
      Word done{"done"};
    };
    const auto w = std::make_shared<World>();
    m.thread("left", [w, fence] {
      M::store(w->x, 1, kRelaxed, kPlain);
      M::fence(fence, kPlain);
      M::write(w->a, M::load(w->y, kRelaxed, kPlain));
      M::store(w->done, 1, kRelease, kPlain);
    });
    m.thread("right", [w, fence] {
      M::store(w->y, 1, kRelaxed, kPlain);
      M::fence(fence, kPlain);
      const std::uint64_t right = M::load(w->x, kRelaxed, kPlain);
      if (M::load(w->done, kAcquire, kPlain) == 0) return;
      expect(M::read(w->a) + right > 0, "neither saw the other");
    });
  };
}

TEST(Memory, OfTwoThatStoreFenceAndLoadOneSeesTheOther) { holds(store_load(kSeqCst)); }
TEST(Memory, WithoutTheFenceNeitherMaySeeTheOther) { fails("neither saw the other", store_load(kRelaxed)); }
TEST(Memory, FencesOfReleaseAndAcquireAreNotEnoughForThat) {
  fails("neither saw the other", store_load(std::memory_order_acq_rel));
}

Machine::Scenario message(std::memory_order store, std::memory_order load, std::memory_order before,
                          std::memory_order after, bool bytes) {
  return [=](Machine& m) {
    struct World {
      Word flag{"flag"}, word{"word"};
      Cell<std::uint64_t> bytes{"bytes"};
    };
    const auto w = std::make_shared<World>();
    m.thread("writer", [=] {
      M::write(w->bytes, 7);
      M::store(w->word, 7, kRelaxed, kPlain);
      M::fence(before, kPlain);
      M::store(w->flag, 1, store, kPlain);
    });
    m.thread("reader", [=] {
      if (M::load(w->flag, load, kPlain) == 0) return;
      M::fence(after, kPlain);
      if (bytes) expect(M::read(w->bytes) == 7, "old bytes");
      expect(M::load(w->word, kRelaxed, kPlain) == 7, "an old word");
    });
  };
}

TEST(Memory, AReleaseThatIsAcquiredPassesOnWhatCameBefore) {
  holds(message(kRelease, kAcquire, kRelaxed, kRelaxed, true));
}
TEST(Memory, FencesDoTheSameForRelaxedAccesses) { holds(message(kRelaxed, kRelaxed, kRelease, kAcquire, true)); }
TEST(Memory, AReleaseAloneOrAnAcquireAlonePassesOnNothing) {
  fails("an old word", message(kRelease, kRelaxed, kRelaxed, kRelaxed, false));
  fails("an old word", message(kRelaxed, kAcquire, kRelaxed, kRelaxed, false));
  fails("race", message(kRelease, kRelaxed, kRelaxed, kRelaxed, true));
}
TEST(Memory, AFenceOnOneSideAlonePassesOnNothing) {
  fails("an old word", message(kRelaxed, kRelaxed, kRelease, kRelaxed, false));
  fails("an old word", message(kRelaxed, kRelaxed, kRelaxed, kAcquire, false));
  fails("race", message(kRelaxed, kRelaxed, kRelaxed, kAcquire, true));
}

Machine::Scenario coherence() {
  return [](Machine& m) {
    const auto word = std::make_shared<Word>("word");
    m.thread("writer", [word] {
      for (std::uint64_t i = 1; i <= 3; ++i) M::store(*word, i, kRelaxed, kPlain);
    });
    m.thread("reader", [word] {
      const std::uint64_t first = M::load(*word, kRelaxed, kPlain);
      expect(M::load(*word, kRelaxed, kPlain) >= first, "a word went back");
    });
  };
}

TEST(Memory, AWordNeverGoesBackForOneReader) { holds(coherence()); }

// Two readers may see two writers' words in different orders unless they fence between their loads.
Machine::Scenario two_orders(std::memory_order fence) {
  return [fence](Machine& m) {
    struct World {
      Word x{"x"}, y{"y"}, done{"done"};
      Cell<std::uint64_t> first{"first"};
    };
    const auto w = std::make_shared<World>();
    m.thread("writer of x", [w] { M::store(w->x, 1, kRelease, kPlain); });
    m.thread("writer of y", [w] { M::store(w->y, 1, kRelease, kPlain); });
    m.thread("reader of x, y", [w, fence] {
      const std::uint64_t x = M::load(w->x, kAcquire, kPlain);
      M::fence(fence, kPlain);
      M::write(w->first, x == 1 && M::load(w->y, kAcquire, kPlain) == 0);
      M::store(w->done, 1, kRelease, kPlain);
    });
    m.thread("reader of y, x", [w, fence] {
      const std::uint64_t y = M::load(w->y, kAcquire, kPlain);
      M::fence(fence, kPlain);
      const bool other = y == 1 && M::load(w->x, kAcquire, kPlain) == 0;
      if (M::load(w->done, kAcquire, kPlain) == 0) return;
      expect(!(other && M::read(w->first) == 1), "two orders");
    });
  };
}

TEST(Memory, ReadersThatFenceAgreeOnAnOrder) { holds(two_orders(kSeqCst)); }
TEST(Memory, ReadersThatDoNotFenceNeedNotAgree) { fails("two orders", two_orders(kRelaxed)); }

Machine::Scenario bytes(bool handed_over) {
  return [handed_over](Machine& m) {
    struct World {
      Word over{"over"};
      Cell<std::uint64_t> bytes{"bytes"};
    };
    const auto w = std::make_shared<World>();
    m.thread("reader", [w, handed_over] {
      M::read(w->bytes);
      M::store(w->over, 1, handed_over ? kRelease : kRelaxed, kPlain);
    });
    m.thread("writer", [w] {
      if (M::load(w->over, kAcquire, kPlain) == 1) M::write(w->bytes, 1);
    });
  };
}

TEST(Memory, BytesThatAreHandedOverMayBeWritten) { holds(bytes(true)); }
TEST(Memory, BytesThatMayStillBeReadMayNotBeWritten) { fails("may still read it", bytes(false)); }

TEST(Memory, AProcessMayBeKilledBeforeAnyOfItsAccesses) {
  for (std::uint64_t stores = 0; stores <= 2; ++stores) {
    fails("killed there", [stores](Machine& m) {
      const auto word = std::make_shared<Word>("word");
      m.mortal(
          "process",
          [word] {
            M::store(*word, 1, kRelaxed, kPlain);
            M::store(*word, 2, kRelaxed, kPlain);
            M::load(*word, kRelaxed, kPlain);
          },
          [word, stores] { expect(M::load(*word, kRelaxed, kPlain) != stores, "killed there"); });
    });
  }
}

// What the search leaves out, it has seen: with and without that the same ends are reached.
TEST(Search, LeavingOutKnownStatesLosesNoEnd) {
  for (const auto& scenario : {store_load(kSeqCst), message(kRelease, kAcquire, kRelaxed, kRelaxed, true), coherence(),
                               bytes(true), two_orders(kSeqCst)}) {
    const Report some = Machine::explore(scenario), all = Machine::explore(scenario, kPlain, true);
    EXPECT_EQ(some.ends, all.ends);
    EXPECT_LT(some.executions, all.executions + 1);
    EXPECT_GT(all.ends.size(), 1u);
  }
}

}  // namespace
}  // namespace kvq::model
