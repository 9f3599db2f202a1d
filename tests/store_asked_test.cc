// What operators ask the store for: to drop what is cached, to empty what is sparse.
#include <gtest/gtest.h>

#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

constexpr std::uint64_t kDenseBytes = 16384;

// Calm at any use, so that nothing happens that was not asked for.
StoreConfig calm() {
  StoreConfig config = StoreNode::small();
  config.watermarks = {.quantize_at = 0.97, .evict_at = 0.98, .refuse_at = 0.99, .relief = 0.01};
  return config;
}

struct Asked : ::testing::Test {
  explicit Asked(const StoreConfig& config = calm()) : node(32, config) {}

  StoreNode node;
  TenantId tenant = node.tenant("a");
  std::unique_ptr<SimClient> client = node.client(tenant);
  SimServer s{node, *client};

  // A chain that nobody holds any more.
  std::vector<PageId> cache(std::uint32_t content, std::uint32_t pages) {
    const auto out = s.grow(content, content, pages);
    EXPECT_EQ(out.size(), pages);
    s.release(content);
    node.ticks(4);
    return out;
  }
  bool cached(std::uint32_t content, std::uint32_t index) const {
    return client->find(chain_key(content, index)).page != kNullPage;
  }
  DropReport drop(std::uint64_t idle_ms = 0, bool dry_run = false) {
    return node.store->drop_cached(std::nullopt, idle_ms, dry_run, node.now_ms);
  }
  CompactReport compact(bool dry_run = false) { return node.store->compact(std::nullopt, dry_run, node.now_ms); }
  std::uint32_t used() const {
    const StoreStatus status = node.store->status();
    return status.slabs - status.slabs_free;
  }
  // Slabs that hold 4 dense pages each; of each, those whose number `keeps` takes stay in a parked sequence.
  template <typename Keeps>
  void make_sparse(std::uint32_t slabs, Keeps keeps) {
    for (std::uint32_t i = 0; i < slabs * 4; ++i) {
      ASSERT_EQ(s.grow(i + 1, i + 1, 1).size(), 1u);
      s.park(i + 1);
    }
    for (std::uint32_t i = 0; i < slabs * 4; ++i) {
      if (!keeps(i)) s.release(i + 1);
    }
    drop();
    node.ticks(20);
    node.store->check_invariants();
  }
};

using Evict = Asked;
using Compact = Asked;

struct SlowCompact : Asked {
  SlowCompact()
      : Asked([] {
          StoreConfig config = calm();
          config.actions_per_tick = 2;
          return config;
        }()) {}
};

TEST_F(Evict, TakesWhatNobodyHoldsAndNothingElse) {
  cache(1, 5);
  const auto held = s.grow(2, 2, 5);
  s.park(2);
  const DropReport report = drop();
  EXPECT_EQ(report.pages, 5u);
  EXPECT_EQ(report.bytes, 5 * kDenseBytes);
  node.ticks(5);
  for (std::uint32_t i = 0; i < 5; ++i) {
    EXPECT_FALSE(cached(1, i)) << i;
    EXPECT_TRUE(cached(2, i)) << i;
    EXPECT_TRUE(client->holds(held[i], value_of(chain_key(2, i))));
  }
  EXPECT_EQ(node.store->status().counts.drops, 5u);
  node.ticks(3, 100);
  EXPECT_EQ(used(), 2u) << "what was dropped is free memory again";
  node.store->check_invariants();
}

TEST_F(Evict, ADryRunOnlySaysIt) {
  cache(1, 5);
  EXPECT_EQ(drop(0, true).pages, 5u);
  node.ticks(5);
  for (std::uint32_t i = 0; i < 5; ++i) EXPECT_TRUE(cached(1, i)) << i;
}

TEST_F(Evict, KeepsThePrefixOfWhatIsHeld) {
  cache(1, 6);
  ASSERT_TRUE(s.attach(9, 1, 2));
  EXPECT_EQ(drop().pages, 4u);
  node.ticks(5);
  for (std::uint32_t i = 0; i < 6; ++i) EXPECT_EQ(cached(1, i), i < 2) << i;
  node.store->check_invariants();
}

TEST_F(Evict, KeepsAPrefixWhoseOtherBranchIsHeld) {
  ASSERT_EQ(s.grow(1, 1, 3).size(), 3u);
  s.act(CommandKind::fork, 2, 3, 1);
  ASSERT_TRUE(s.want(2));
  for (std::uint32_t sequence : {1u, 2u}) {  // page 3 of each continues the same three pages in another way
    const Key key = chain_key(10 + sequence, 3);
    s.seal(sequence, 3, s.take(sequence, 3, key), key);
  }
  s.drain();
  node.ticks(2);
  s.release(1);
  node.ticks(2);
  EXPECT_EQ(drop().pages, 1u);
  s.release(2);
  node.ticks(2);
  EXPECT_EQ(client->find(chain_key(11, 3)).page, kNullPage);
  EXPECT_NE(client->find(chain_key(12, 3)).page, kNullPage);
  EXPECT_EQ(drop().pages, 4u) << "a parent goes with the last of its children";
  node.ticks(5);
  EXPECT_EQ(node.store->status().tenants[0].cached_pages, 0u);
  node.store->check_invariants();
}

TEST_F(Evict, SparesWhatWasUsedLately) {
  cache(1, 2);
  node.ticks(1, 1000);
  cache(2, 2);
  EXPECT_EQ(drop(500, true).pages, 2u);
  EXPECT_EQ(drop(1'000'000, true).pages, 0u) << "longer than the clock runs";
  drop(500);
  node.ticks(5);
  EXPECT_FALSE(cached(1, 0));
  EXPECT_TRUE(cached(2, 0));
}

TEST_F(Evict, SparesWhatIsUsedBeforeItsTurn) {
  cache(1, 4);
  cache(2, 4);
  EXPECT_EQ(drop().pages, 8u);
  ++node.now_ms;
  ASSERT_TRUE(s.attach(9, 1, 3));
  s.release(9);
  node.ticks(5);
  for (std::uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(cached(1, i), i < 3) << i;
    EXPECT_FALSE(cached(2, i)) << i;
  }
}

TEST_F(Evict, IsOfOneTenantWhenOneIsNamed) {
  const TenantId other = node.tenant("b");
  auto second = node.client(other);
  SimServer two{node, *second};
  cache(1, 3);
  ASSERT_EQ(two.grow(1, 1, 3).size(), 3u);
  two.release(1);
  node.ticks(4);
  EXPECT_EQ(node.store->drop_cached(other, 0, false, node.now_ms).pages, 3u);
  node.ticks(4);
  EXPECT_TRUE(cached(1, 2));
  EXPECT_EQ(second->find(chain_key(1, 2)).page, kNullPage);
}

TEST_F(Evict, TakesAsManyInATickAsAPlanHas) {
  for (std::uint32_t i = 1; i <= 20; ++i) cache(i, 5);
  EXPECT_EQ(drop().pages, 100u);
  EXPECT_EQ(node.tick().dropped_pages, 64u);
  EXPECT_TRUE(node.tick().busy || node.store->status().counts.drops == 100u);
  EXPECT_EQ(node.store->status().counts.drops, 100u);
}

TEST_F(Compact, EmptiesTheSparsestSlabsIntoTheOthers) {
  make_sparse(8, [](std::uint32_t i) { return i % 4 == 0 || i < 12; });  // 3 full slabs, 5 with one page each
  ASSERT_EQ(used(), 8u);
  const CompactReport said = compact(true);
  EXPECT_EQ(said.slabs, 3u) << "five pages need two slabs";
  EXPECT_EQ(said.pages, 3u);
  EXPECT_EQ(said.bytes, 3 * kDenseBytes);
  node.ticks(5);
  EXPECT_EQ(used(), 8u) << "a dry run moves nothing";
  EXPECT_EQ(compact().slabs, 3u);
  node.ticks(40, 20);
  EXPECT_EQ(used(), 5u);
  EXPECT_EQ(node.store->status().counts.transcodes[1][1], 3u) << "each page moved once";
  for (std::uint32_t i = 0; i < 32; ++i) {
    if (i % 4 != 0 && i >= 12) continue;
    EXPECT_TRUE(client->holds(client->find(chain_key(i + 1, 0)).page, value_of(chain_key(i + 1, 0)))) << i;
  }
  EXPECT_EQ(compact().slabs, 0u) << "there is nothing left to do";
  node.store->check_invariants();
}

TEST_F(Compact, LeavesASlabWhosePageCannotMove) {
  make_sparse(3, [](std::uint32_t i) { return i % 4 == 0; });
  ASSERT_TRUE(s.want(1));  // an unwritten page lies in the fullest, which is the first
  EXPECT_EQ(compact(true).slabs, 2u);
  ASSERT_TRUE(s.want(7));  // now one lies in each
  EXPECT_EQ(compact(true).slabs, 0u);
}

TEST_F(Compact, TakesNoSlab) {
  make_sparse(6, [](std::uint32_t i) { return i % 4 == 0; });
  const std::uint64_t created = node.store->status().counts.slabs_created;
  compact();
  node.ticks(40, 20);
  EXPECT_EQ(node.store->status().counts.slabs_created, created);
  EXPECT_EQ(used(), 2u);
}

TEST_F(Compact, GivesASlabUpThatFillsMeanwhile) {
  make_sparse(3, [](std::uint32_t i) { return i % 4 == 0; });
  node.device.hold_jobs = true;
  EXPECT_EQ(compact().slabs, 2u);
  ASSERT_TRUE(s.want(9));  // all that was free
  node.device.hold_jobs = false;
  node.ticks(40, 20);
  EXPECT_LE(node.store->status().counts.transcodes[1][1], 2u);
  for (std::uint32_t i : {0u, 4u, 8u}) {
    EXPECT_TRUE(client->holds(client->find(chain_key(i + 1, 0)).page, value_of(chain_key(i + 1, 0)))) << i;
  }
  node.store->check_invariants();
}

TEST_F(SlowCompact, GoesOnOverTicksAndOverJobsThatFail) {
  make_sparse(8, [](std::uint32_t i) { return i % 4 < 2; });
  node.device.faults = {.max_delay_polls = 3, .fail_passing = 0.1};
  EXPECT_EQ(compact().slabs, 4u);
  node.ticks(200, 5);
  node.device.faults = {};
  compact();
  node.ticks(40, 20);
  EXPECT_EQ(used(), 4u);
  node.store->check_invariants();
}

TEST_F(Compact, WaitsForAReaderThatLostItsConnection) {
  make_sparse(3, [](std::uint32_t i) { return i % 4 == 0; });
  const std::uint64_t step = client->begin_step();
  node.store->disconnect(client->id);
  EXPECT_EQ(compact(true).slabs, 0u) << "it maps no other place of these pages";
  client->end_step(step);
}

}  // namespace
}  // namespace kvq::testing
