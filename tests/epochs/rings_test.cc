// The two rings: what a side takes out is what the other put in, whole, once and in order.
//
// Invariant: each ring holds fewer items than pass through it, so every place is used again.
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  item_before_index,  // broken: `produced` is stored first
  copy_before_index,  // broken: `consumed` is stored before the item is copied out
  room_before_push,   // broken: the producer does not look at `consumed`
};

constexpr std::uint64_t kItems = 3;
constexpr int kLooks = 4;  // at the other side's word, per side

template <typename R>
void produce(R& ring, Rule broken, const std::function<std::uint64_t(std::uint64_t)>& make) {
  std::uint64_t produced = 0;
  for (int look = 0; look < kLooks && produced < kItems; ++look) {
    const std::uint64_t consumed = broken == Rule::room_before_push ? produced : ring_consumed<M>(ring);
    if (produced - consumed >= std::size(ring.item)) continue;
    const std::uint64_t item = make(produced + 1);
    if (broken == Rule::item_before_index) {
      M::store(ring.produced, ++produced, std::memory_order_release, Site::plain);
      M::write(ring.item[(produced - 1) % std::size(ring.item)], item);
    } else {
      ring_push<M>(ring, produced, item);
    }
  }
}

template <typename R>
void consume(R& ring, Rule broken, const std::function<void(std::uint64_t)>& use) {
  std::uint64_t consumed = 0;
  for (int look = 0; look < kLooks; ++look) {
    if (ring_produced<M>(ring) == consumed) continue;
    std::uint64_t item = 0;
    if (broken == Rule::copy_before_index) {
      M::store(ring.consumed, ++consumed, std::memory_order_release, Site::plain);
      item = M::read(ring.item[(consumed - 1) % std::size(ring.item)]);
    } else {
      item = ring_pop<M>(ring, consumed);
    }
    expect(item == consumed, "an item is lost, torn or out of order");
    use(item);
  }
}

struct World {
  Ring<std::uint64_t, 2> ring;
  Cell<std::uint64_t> page[kItems + 1] = {Cell<std::uint64_t>{"page 0"}, Cell<std::uint64_t>{"page 1"},
                                          Cell<std::uint64_t>{"page 2"}, Cell<std::uint64_t>{"page 3"}};
};

// A credit names a page that the daemon had in hand and that the client writes from then on.
Machine::Scenario credits(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("daemon", [w, broken] {
      produce(w->ring, broken, [&](std::uint64_t page) {
        M::write(w->page[page], 0);
        return page;
      });
    });
    m.thread("client",
             [w, broken] { consume(w->ring, broken, [&](std::uint64_t page) { M::write(w->page[page], 7); }); });
  };
}

Machine::Scenario commands(Rule broken = Rule::kept) {
  return [broken](Machine& m) {
    const auto ring = std::make_shared<Ring<std::uint64_t, 1>>();
    m.thread("client", [ring, broken] { produce(*ring, broken, [](std::uint64_t serial) { return serial; }); });
    m.thread("daemon", [ring, broken] { consume(*ring, broken, [](std::uint64_t) {}); });
  };
}

TEST(Rings, CreditsThroughTheMagazine) { holds(credits()); }
TEST(Rings, CommandsThroughTheRing) { holds(commands()); }

class RingWithout : public testing::TestWithParam<Site> {};
TEST_P(RingWithout, Fails) {
  fails("race", credits(), GetParam());
  fails("race", commands(), GetParam());
}
INSTANTIATE_TEST_SUITE_P(, RingWithout, testing::ValuesIn(kRingSites), site_of);

TEST(RingRules, Fail) {
  for (const Rule rule : {Rule::item_before_index, Rule::copy_before_index, Rule::room_before_push}) {
    fails("item", credits(rule));
    fails("item", commands(rule));
  }
}

}  // namespace
}  // namespace kvq::model
