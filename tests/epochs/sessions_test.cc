// A session that lost its connection, and one whose process is dead.
//
// Invariant: a process that lives may read until its steps end, whatever its socket does; one whose pidfd is readable
// runs no instruction any more. The daemon's lines are those of daemon/store_sessions.cc and store_pressure.cc.
#include "daemon/core/limbo.h"
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

constexpr std::uint64_t kContent = 7, kOther = 99;

std::uint64_t entry_of(std::uint32_t place) {
  return pack_entry({1, Format::dense, EntryState::sealed, place * kOffsetUnitBytes});
}

// --- revoked: the page moves to a slab that this process will never map ---

enum class Rule {
  kept,
  word_after_begun,  // broken: the step looks at the word before it stores `begun`
  no_step_is_open,   // broken: the daemon moves pages at once
};

struct Cut {
  Word epoch{"epoch", 1}, entry{"entry", entry_of(0)}, revoked{"revoked"};
  Slot step[1];
};

Machine::Scenario cut_off(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<Cut>();
    m.thread("client", [w, broken] {
      Word never("no word");
      for (std::uint64_t serial = 1; serial <= 2; ++serial) {
        if (broken == Rule::word_after_begun) {
          if (M::load(w->revoked, std::memory_order_relaxed, Site::plain) != 0) return;
          begin_step<M>(w->step[0], serial, w->epoch, never);
        } else if (!begin_step<M>(w->step[0], serial, w->epoch, w->revoked)) {
          expect(!is_open<M>(w->step[0]), "a step that was refused stays open");
          return;
        }
        expect(load_entry<M>(w->entry) == entry_of(0), "a step meets a slab that its process has not mapped");
        end_step<M>(w->step[0], serial);
      }
    });
    m.thread("daemon", [w, broken] {
      revoke<M>(w->revoked);
      for (int tick = 0; tick < 2; ++tick) {
        if (broken != Rule::no_step_is_open && open_steps<M>(w->step) > 0) continue;
        return publish_entry<M>(w->entry, entry_of(1));
      }
    });
  };
}

TEST(Revoked, AStepThatBeginsAgainstTheWord) { holds(cut_off()); }

class RevokedWithout : public testing::TestWithParam<Site> {};
TEST_P(RevokedWithout, Fails) { fails("has not mapped", cut_off(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(, RevokedWithout, testing::ValuesIn(kRevokeSites), site_of);

TEST(RevokedRules, Fail) {
  fails("has not mapped", cut_off(Rule::word_after_begun));
  fails("has not mapped", cut_off(Rule::no_step_is_open));
}

// --- death: the process may be killed anywhere; before that it closes its socket inside a step ---

enum class Gone { pidfd, socket, never };

struct Mortal {
  Word epoch{"epoch", 1}, entry{"entry", entry_of(0)}, revoked{"revoked"}, socket{"socket closed"}, pidfd{"pidfd"};
  Cell<std::uint64_t> place[2] = {Cell<std::uint64_t>{"place X", kContent}, Cell<std::uint64_t>{"place Y"}};
  Slot step[1];
};

// `when`: what the daemon takes for the end of the process. `reused`: called when place X is given to another page.
Machine::Scenario death(Gone when, std::function<void(bool died)> reused = {}) {
  return [when, reused](Machine& m) {
    const auto w = std::make_shared<Mortal>();
    m.mortal(
        "client",
        [w] {
          begin_step<M>(w->step[0], 1, w->epoch, w->revoked);
          M::store(w->socket, 1, std::memory_order_release, Site::plain);
          const Entry e = unpack_entry(load_entry<M>(w->entry));
          expect(M::read(w->place[e.offset_bytes / kOffsetUnitBytes]) == kContent, "a step reads another page");
          end_step<M>(w->step[0], 1);
        },
        [w] { M::store(w->pidfd, 1, std::memory_order_release, Site::plain); });
    m.thread("daemon", [w, when, reused] {
      Limbo limbo;
      M::write(w->place[1], kContent);
      publish_entry<M>(w->entry, entry_of(1));
      limbo.retire({.slot = {}, .tag = Epoch{1}});
      advance_epoch<M>(w->epoch);
      for (int tick = 0; tick < 2; ++tick) {
        const bool closed = M::load(w->socket, std::memory_order_acquire, Site::plain) == 1;
        const bool dead = M::load(w->pidfd, std::memory_order_acquire, Site::plain) == 1;
        const bool ended = (when == Gone::pidfd && dead) || (when == Gone::socket && closed);
        limbo.reap(ended ? Epoch{3} : oldest_open<M>(w->step, Epoch{2}), [&](const Retired&) {
          if (reused) reused(dead);
          M::write(w->place[0], kOther);
        });
      }
    });
  };
}

TEST(Death, AProcessIsKilledAnywhereInAStep) { holds(death(Gone::pidfd)); }
TEST(DeathRules, StepsThatAreClearedWhenTheSocketClosesFail) { fails("may still read it", death(Gone::socket)); }

// What a dead process held comes back; without the rule it would be held for ever.
TEST(Death, AStepThatADeadProcessLeftOpenHoldsNothingBack) {
  const auto after_death = [](bool died) { expect(!died, "reused after a death"); };
  fails("reused after a death", death(Gone::pidfd, after_death));
}

}  // namespace
}  // namespace kvq::model
