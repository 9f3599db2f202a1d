// The slab pool: conservation of slots, one tenant and layout per slab, the reserve, and which slab fills first.
#include "daemon/core/slab_pool.h"

#include <gtest/gtest.h>

#include <iostream>
#include <random>
#include <set>

#include "tests/support/seed.h"

namespace kvq {
namespace {

constexpr TenantId kA{1}, kB{2};
constexpr LayoutId kDense{1}, kCold{2};

SlabId ready(SlabPool& pool, TenantId tenant, LayoutId layout, std::uint64_t page_bytes) {
  const auto slab = pool.open(tenant, layout, page_bytes, false);
  EXPECT_TRUE(slab);
  pool.set_ready(*slab, 0);
  return *slab;
}

TEST(SlabPool, SlotsOfOneSlabAreDistinctAndInside) {
  SlabPool pool(2, 4096 * 70, 0);
  ready(pool, kA, kDense, 4096);
  std::set<std::uint64_t> offsets;
  for (std::uint32_t i = 0; i < 70; ++i) {
    const auto slot = pool.take(kA, kDense, PageId{i + 1});
    ASSERT_TRUE(slot);
    EXPECT_LT(pool.offset_bytes(*slot), 4096u * 70);
    EXPECT_TRUE(offsets.insert(pool.offset_bytes(*slot)).second);
  }
  EXPECT_FALSE(pool.take(kA, kDense, PageId{99}));
  pool.check_invariants();
}

TEST(SlabPool, SlabServesItsTenantAndLayoutAlone) {
  SlabPool pool(4, 65536, 0);
  ready(pool, kA, kDense, 16384);
  EXPECT_FALSE(pool.take(kB, kDense, PageId{1}));
  EXPECT_FALSE(pool.take(kA, kCold, PageId{1}));
  EXPECT_TRUE(pool.take(kA, kDense, PageId{1}));
}

TEST(SlabPool, SlabThatIsBeingCreatedGivesNoSlots) {
  SlabPool pool(4, 65536, 0);
  const auto slab = pool.open(kA, kDense, 16384, false);
  EXPECT_FALSE(pool.take(kA, kDense, PageId{1}));
  EXPECT_EQ(pool.creating_slots(kA, kDense), 4u);
  EXPECT_EQ(pool.ready_free_slots(kA, kDense), 0u);
  pool.set_ready(*slab, 0);
  EXPECT_EQ(pool.creating_slots(kA, kDense), 0u);
  EXPECT_EQ(pool.ready_free_slots(kA, kDense), 4u);
}

TEST(SlabPool, ReserveIsForTranscodesAlone) {
  SlabPool pool(3, 65536, 1);
  EXPECT_TRUE(pool.open(kA, kDense, 16384, false));
  EXPECT_TRUE(pool.open(kA, kDense, 16384, false));
  EXPECT_FALSE(pool.open(kA, kDense, 16384, false));
  EXPECT_TRUE(pool.open(kA, kCold, 4608, true));
  EXPECT_FALSE(pool.open(kA, kCold, 4608, true));
  EXPECT_EQ(pool.free_slabs(), 0u);
}

TEST(SlabPool, AGrownLimitGivesFurtherSlabs) {
  SlabPool pool(2, 65536, 1, 4);
  EXPECT_TRUE(pool.open(kA, kDense, 16384, false));
  EXPECT_FALSE(pool.open(kA, kDense, 16384, false));
  pool.set_limit(4);
  EXPECT_EQ(pool.usable_slabs(), 3u);
  EXPECT_TRUE(pool.open(kA, kDense, 16384, false));
  EXPECT_EQ(raw(*pool.open(kA, kDense, 16384, false)), 2u);
  EXPECT_FALSE(pool.open(kA, kDense, 16384, false));
  EXPECT_EQ(raw(*pool.open(kA, kCold, 4608, true)), 3u);
  pool.check_invariants();
}

TEST(SlabPool, SlabsAboveALoweredLimitGoAndOnlyTranscodesGetFurtherOnes) {
  SlabPool pool(8, 65536, 1);
  std::vector<SlabId> slabs;
  for (int i = 0; i < 7; ++i) slabs.push_back(*pool.open(kA, kDense, 16384, false));
  pool.set_limit(4);
  EXPECT_EQ(pool.over_slabs(), 3u);
  EXPECT_EQ(pool.free_slabs(), 0u);
  EXPECT_EQ(pool.ceiling(), 8u) << "one for transcodes, as before";
  EXPECT_FALSE(pool.open(kA, kDense, 16384, false));
  const SlabId cold = *pool.open(kA, kCold, 4608, true);
  EXPECT_FALSE(pool.open(kA, kCold, 4608, true));
  const auto close = [&](SlabId slab) {
    pool.start_drain(slab);
    pool.close(slab);
    pool.check_invariants();
  };
  for (int i = 0; i < 3; ++i) close(slabs[static_cast<std::size_t>(i)]);
  EXPECT_EQ(pool.over_slabs(), 1u);
  EXPECT_EQ(pool.ceiling(), 6u);
  close(cold);
  EXPECT_EQ(pool.over_slabs(), 0u);
  EXPECT_EQ(pool.ceiling(), 4u) << "from here on it is an arena like any other";
  close(slabs[3]);
  EXPECT_EQ(pool.free_slabs(), 1u);
  EXPECT_FALSE(pool.open(kA, kDense, 16384, false)) << "that is the reserve";
  pool.set_limit(8);
  EXPECT_EQ(pool.ceiling(), 8u);
  EXPECT_TRUE(pool.open(kA, kDense, 16384, false));
}

TEST(SlabPool, TranscodesGetASlabHoweverFullTheArenaWas) {
  SlabPool full(4, 65536, 1, 8);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(full.open(kA, i < 3 ? kDense : kCold, i < 3 ? 16384 : 4608, i == 3));
  full.set_limit(2);
  EXPECT_TRUE(full.open(kA, kCold, 4608, true));
  SlabPool adopted(2, 65536, 1, 8);  // of a daemon that shrinks it
  for (std::uint32_t i = 0; i < 6; ++i) adopted.adopt(SlabId{i}, kA, kDense, 16384);
  adopted.set_limit(2);
  EXPECT_EQ(adopted.over_slabs(), 4u);
  EXPECT_TRUE(adopted.open(kA, kCold, 4608, true));
  EXPECT_FALSE(adopted.open(kA, kCold, 4608, true));
  adopted.check_invariants();
}

TEST(SlabPool, FullestSlabFillsFirst) {
  SlabPool pool(3, 65536, 0);
  const SlabId one = ready(pool, kA, kDense, 16384), two = ready(pool, kA, kDense, 16384);
  std::vector<SlotRef> slots;
  for (std::uint32_t i = 1; i <= 7; ++i) slots.push_back(*pool.take(kA, kDense, PageId{i}));
  for (int i : {0, 1, 2}) {  // one slab has one page left, the other three
    pool.retire(slots[static_cast<std::size_t>(i)]);
    pool.reap(slots[static_cast<std::size_t>(i)], 1);
  }
  pool.forget_hints();
  EXPECT_EQ(pool.take(kA, kDense, PageId{9})->slab, pool.slab(one).live > pool.slab(two).live ? one : two);
  EXPECT_EQ(pool.slab(slots[6].slab).live, 4u);
}

TEST(SlabPoolDeathTest, SlotIsFreedOnce) {
  SlabPool pool(1, 65536, 0);
  ready(pool, kA, kDense, 16384);
  const SlotRef slot = *pool.take(kA, kDense, PageId{1});
  pool.retire(slot);
  EXPECT_DEATH(pool.retire(slot), "assertion failed");
  pool.reap(slot, 1);
  EXPECT_DEATH(pool.reap(slot, 1), "assertion failed");
  EXPECT_DEATH(pool.give_back(slot, 1), "assertion failed");
}

TEST(SlabPoolDeathTest, SlabWithPagesDoesNotDrain) {
  SlabPool pool(1, 65536, 0);
  const SlabId slab = ready(pool, kA, kDense, 16384);
  const SlotRef slot = *pool.take(kA, kDense, PageId{1});
  EXPECT_DEATH(pool.start_drain(slab), "assertion failed");
  pool.retire(slot);
  EXPECT_DEATH(pool.start_drain(slab), "assertion failed");
  pool.reap(slot, 1);
  pool.start_drain(slab);
  pool.close(slab);
  EXPECT_EQ(pool.free_slabs(), 1u);
}

TEST(SlabPool, RandomTakesAndReturnsConserveSlots) {
  const std::uint64_t seed = testing::test_seed(3);
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  SlabPool pool(6, 65536, 1);
  std::vector<SlotRef> live, limbo;
  std::uint32_t page = 1;
  for (int i = 0; i < 5000; ++i) {
    const auto pick = [&](std::vector<SlotRef>& from) {
      const std::size_t at = random() % from.size();
      const SlotRef slot = from[at];
      from.erase(from.begin() + static_cast<std::ptrdiff_t>(at));
      return slot;
    };
    switch (random() % 5) {
      case 0:
        if (const bool dense = random() % 2 != 0; true) {
          const auto slab = pool.open(random() % 2 ? kA : kB, dense ? kDense : kCold, dense ? 16384 : 4608, false);
          if (slab) pool.set_ready(*slab, 1);
        }
        break;
      case 1:
      case 2:
        if (const auto slot = pool.take(random() % 2 ? kA : kB, random() % 2 ? kDense : kCold, PageId{page++})) {
          live.push_back(*slot);
        }
        break;
      case 3:
        if (!live.empty()) {
          limbo.push_back(pick(live));
          pool.retire(limbo.back());
        }
        break;
      default:
        if (!limbo.empty()) pool.reap(pick(limbo), 1);
        const SlabId slab{static_cast<std::uint32_t>(random() % pool.size())};
        if (pool.slab(slab).state == SlabState::ready && pool.slab(slab).empty()) {
          pool.start_drain(slab);
          pool.close(slab);
        }
    }
    pool.check_invariants();
  }
}

}  // namespace
}  // namespace kvq
