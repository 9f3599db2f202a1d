// Kernels look pages up in a mirror that a worker brings to what the directory says, later.
//
// Invariant: the worker says how far the mirror is with a release; what was moved is retired, and a credit shown, only
// after the daemon has seen that. The worker's stores stand for writes in stream order, and `written` for what the
// device orders before it.
#include "daemon/core/limbo.h"
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  retired_when_the_mirror_shows_it,     // broken: tagged at once
  credits_shown_when_the_mirror_shows,  // broken: shown at once
  written_after_the_entries,            // broken: the worker says so first
};

constexpr std::uint64_t kContent = 7, kOther = 99;

std::uint64_t entry_of(std::uint32_t place, EntryState state = EntryState::sealed) {
  return pack_entry({1, Format::dense, state, place * kOffsetUnitBytes});
}

struct World {
  Word epoch{"epoch", 1}, revoked{"revoked"}, sent{"sent"}, written{"written"};
  Word entry{"entry", entry_of(0)}, mirror{"mirror", entry_of(0)};
  Cell<std::uint64_t> place[2] = {Cell<std::uint64_t>{"place X", kContent}, Cell<std::uint64_t>{"place Y"}};
  Slot step[1];
  Ring<std::uint64_t, 2> magazine;
};

void worker(World& w, Rule broken) {
  if (M::load(w.sent, std::memory_order_acquire, Site::plain) == 0) return;
  if (broken == Rule::written_after_the_entries) M::store(w.written, 1, std::memory_order_release, Site::plain);
  publish_entry<M>(w.mirror, load_entry<M>(w.entry));
  if (broken != Rule::written_after_the_entries) M::store(w.written, 1, std::memory_order_release, Site::plain);
}

bool is_written(World& w) { return M::load(w.written, std::memory_order_acquire, Site::plain) != 0; }

Machine::Scenario move(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("reader", [w] {
      begin_step<M>(w->step[0], 1, w->epoch, w->revoked);
      const Entry e = unpack_entry(load_entry<M>(w->mirror));
      expect(M::read(w->place[e.offset_bytes / kOffsetUnitBytes]) == kContent, "a kernel reads another page");
      end_step<M>(w->step[0], 1);
    });
    m.thread("worker", [w, broken] { worker(*w, broken); });
    m.thread("daemon", [w, broken] {
      Limbo limbo;
      bool retired = false;
      std::uint64_t epoch = 1;
      M::write(w->place[1], kContent);
      publish_entry<M>(w->entry, entry_of(1));
      M::store(w->sent, 1, std::memory_order_release, Site::plain);
      for (int tick = 0; tick < 2; ++tick) {
        if (!retired && (broken == Rule::retired_when_the_mirror_shows_it || is_written(*w))) {
          limbo.retire({.slot = {}, .tag = Epoch{epoch++}});
          advance_epoch<M>(w->epoch);
          retired = true;
        }
        limbo.reap(oldest_open<M>(w->step, Epoch{epoch}), [&](const Retired&) { M::write(w->place[0], kOther); });
      }
    });
  };
}

// A client that has a credit may use its page at once, in a kernel.
Machine::Scenario credit(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("writer", [w] {
      std::uint64_t consumed = 0;
      if (ring_produced<M>(w->magazine) == 0) return;
      expect(ring_pop<M>(w->magazine, consumed) == 2, "a credit is torn");
      const Entry e = unpack_entry(load_entry<M>(w->mirror));
      expect(e.state == EntryState::open, "a credit comes before its entry");
      M::write(w->place[e.offset_bytes / kOffsetUnitBytes], kOther);
    });
    m.thread("worker", [w, broken] { worker(*w, broken); });
    m.thread("daemon", [w, broken] {
      std::uint64_t produced = 0;
      publish_entry<M>(w->entry, entry_of(1, EntryState::open));
      M::store(w->sent, 1, std::memory_order_release, Site::plain);
      for (int tick = 0; tick < 2 && produced == 0; ++tick) {
        if (broken != Rule::credits_shown_when_the_mirror_shows && !is_written(*w)) continue;
        ring_push<M>(w->magazine, produced, std::uint64_t{2});
      }
    });
  };
}

TEST(Mirrors, AKernelAgainstAMove) { holds(move()); }
TEST(Mirrors, ACreditComesAfterItsEntry) { holds(credit()); }

TEST(MirrorRules, ASlotThatIsRetiredBeforeTheMirrorShowsItFails) {
  fails("place X", move(Rule::retired_when_the_mirror_shows_it));
}
TEST(MirrorRules, ACreditThatIsShownBeforeTheMirrorShowsItsEntryFails) {
  fails("a credit comes before its entry", credit(Rule::credits_shown_when_the_mirror_shows));
}
TEST(MirrorRules, AWorkerThatPromisesFails) {
  fails("place X", move(Rule::written_after_the_entries));
  fails("a credit comes before its entry", credit(Rule::written_after_the_entries));
}

}  // namespace
}  // namespace kvq::model
