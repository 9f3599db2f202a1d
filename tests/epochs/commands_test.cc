// A daemon is killed anywhere while it carries out commands; the next one goes on with the ring: each command counts
// once.
//
// Invariant: how far the ring is carried out is part of what a command's transaction commits, and the ring's own word
// follows it. So the word may be behind the record, and the next daemon writes it anew from there.
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  word_follows_the_record,  // broken: the ring advances before the command is committed
  record_is_the_truth,      // broken: the next daemon goes on where the ring's word stands
};

constexpr std::uint64_t kCommands = 3;
constexpr int kLooks = 4;

struct World {
  Ring<std::uint64_t, 1> ring;
  struct Records {
    std::uint64_t carried_out = 0, last = 0;
  } records;  // changed by one transaction per command
};

void client(World& w) {
  std::uint64_t produced = 0;
  for (int look = 0; look < kLooks && produced < kCommands; ++look) {
    if (produced - ring_consumed<M>(w.ring) < std::size(w.ring.item)) ring_push<M>(w.ring, produced, produced + 1);
  }
}

void carry_out(World& w, Rule broken, std::uint64_t consumed) {
  for (int look = 0; look < kLooks; ++look) {
    if (ring_produced<M>(w.ring) == consumed) continue;
    const std::uint64_t command = ring_copy<M>(w.ring, consumed);
    expect(command == w.records.last + 1, "a command is lost or carried out twice");
    if (broken == Rule::word_follows_the_record) ring_advance<M>(w.ring, consumed);
    Machine::current().may_die();  // what is not committed, is undone
    w.records = {w.records.carried_out + 1, command};
    Machine::current().may_die();
    if (broken != Rule::word_follows_the_record) ring_advance<M>(w.ring, consumed);
  }
}

Machine::Scenario killed(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("client", [w] { client(*w); });
    m.mortal(
        "daemon", [=] { carry_out(*w, broken, 0); },
        [=] {
          std::uint64_t consumed = w->records.carried_out;
          if (broken == Rule::record_is_the_truth) {
            consumed = M::load(w->ring.consumed, std::memory_order_relaxed, Site::plain);
          } else {
            M::store(w->ring.consumed, consumed, std::memory_order_release, Site::item_consumed);
          }
          carry_out(*w, broken, consumed);
        });
  };
}

TEST(Commands, OfADaemonThatIsKilledAnywhereCountOnce) { holds(killed()); }

TEST(CommandRules, Fail) {
  fails("lost or carried out twice", killed(Rule::record_is_the_truth));
  fails("item", killed(Rule::word_follows_the_record));
}

}  // namespace
}  // namespace kvq::model
