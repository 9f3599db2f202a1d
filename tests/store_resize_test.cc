// An arena that changes its size while it serves, and under a next daemon.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "daemon/store_tables.h"
#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

constexpr std::uint64_t kSlab = StoreNode::kSlabBytes;

struct Resize : ::testing::Test {
  explicit Resize(const StoreConfig& config = StoreNode::small()) : node(8, config) {}

  StoreNode node;  // 7 usable, of 4 dense pages each; it may grow to 16
  MortalStore& mortal = node.make_mortal();
  TenantId tenant = node.tenant("a");
  std::unique_ptr<SimClient> client = node.client(tenant);
  SimServer s{node, *client};

  Result<ResizeReport> resize(std::uint32_t slabs, bool dry_run = false) {
    return node.store->resize(slabs * kSlab, dry_run);
  }
  StoreStatus status() const { return node.store->status(); }
  // One page each, as many as there is room for, so that each may go alone.
  std::uint32_t fill(std::uint32_t pages, std::uint16_t flags = 0) {
    std::uint32_t grown = 0;
    while (grown < pages && !s.grow(grown + 1, grown + 1, 1, flags).empty()) s.park(++grown);
    return grown;
  }
  bool holds(std::uint32_t content) {
    const Key key = chain_key(content, 0);
    return client->holds(client->find(key).page, value_of(key));
  }
  void expect_sums() {
    const StoreStatus now = status();
    EXPECT_EQ(now.arena_bytes, now.slabs * kSlab);
    EXPECT_EQ(now.arena_bytes, now.target_bytes + now.slabs_over * kSlab);
    std::uint64_t held = 0;
    for (const TenantStatus& t : now.tenants) held += t.page_bytes + t.limbo_bytes + t.free_bytes;
    EXPECT_EQ(held + now.slabs_free * kSlab, now.arena_bytes);
    node.store->check_invariants();
  }
  void die() {
    mortal.die();
    node.ticks(5);
  }
};

TEST_F(Resize, AGrownArenaServesMoreAndItsClientsMapIt) {
  ASSERT_TRUE(node.store->set_watermarks({.quantize_at = 0.97, .evict_at = 0.98, .refuse_at = 0.99, .relief = 0.01}));
  EXPECT_EQ(fill(40, kFormatFloorDense), 28u);
  EXPECT_EQ(node.store->request_credits(client->id, 32).error().code, Errc::limit_reached);
  const auto report = resize(12);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->bytes_before, 8 * kSlab);
  EXPECT_EQ(report->slabs_over, 0u);
  for (std::uint32_t i = 29; i <= 44; ++i) {
    ASSERT_EQ(s.grow(i, i, 1, kFormatFloorDense).size(), 1u) << i;
    s.park(i);
  }
  EXPECT_EQ(client->mapped_slabs(), 11u);
  for (std::uint32_t i = 1; i <= 44; ++i) EXPECT_TRUE(holds(i)) << i;
  EXPECT_EQ(status().arena_bytes, 12 * kSlab);
  EXPECT_EQ(status().start_bytes, 8 * kSlab);
  EXPECT_EQ(status().most_bytes, 16 * kSlab);
  expect_sums();
}

TEST_F(Resize, WhoWaitsForRoomIsServedByAGrownArena) {
  fill(28, kFormatFloorDense);
  EXPECT_EQ(node.store->request_credits(client->id, 4).error().code, Errc::no_memory);
  ASSERT_TRUE(resize(9));
  node.ticks(3);
  EXPECT_GE(client->magazine(), 4u);
}

TEST_F(Resize, EachSizeThatCannotBeIsRefusedAndChangesNothing) {
  EXPECT_EQ(node.store->resize(4 * kSlab + 1, false).error().code, Errc::invalid_argument);
  EXPECT_EQ(resize(0).error().code, Errc::invalid_argument);
  EXPECT_EQ(resize(1).error().code, Errc::invalid_argument) << "the reserve alone";
  EXPECT_EQ(resize(17).error().code, Errc::limit_reached);
  EXPECT_TRUE(resize(16, true));
  EXPECT_TRUE(resize(2, true));
  EXPECT_EQ(status().arena_bytes, 8 * kSlab);
}

TEST_F(Resize, AShrunkArenaQuantizesItsWayDownAndLosesNothing) {
  EXPECT_EQ(fill(20), 20u);
  const auto report = resize(4);
  ASSERT_TRUE(report);
  EXPECT_GT(report->slabs_over, 0u);
  EXPECT_EQ(report->slabs_over, report->slabs_used - 4);
  EXPECT_EQ(status().level, PressureLevel::refuse);
  std::uint64_t before = status().arena_bytes;
  for (int i = 0; i < 60; ++i) {
    node.tick(5);
    expect_sums();
    EXPECT_LE(status().arena_bytes, before + kSlab) << "a slab to transcode into, at most";
    before = std::min(before, status().arena_bytes);
  }
  EXPECT_EQ(status().slabs_over, 0u);
  EXPECT_EQ(status().arena_bytes, 4 * kSlab);
  EXPECT_EQ(status().counts.drops, 0u);
  for (std::uint32_t i = 1; i <= 20; ++i) EXPECT_TRUE(holds(i)) << i;
}

TEST_F(Resize, AShrunkArenaDropsWhatIsCachedWhenThatIsNotEnough) {
  EXPECT_EQ(fill(20, kFormatFloorDense), 20u);
  for (std::uint32_t i = 1; i <= 16; ++i) s.release(i);
  node.ticks(5);
  ASSERT_TRUE(resize(3));
  node.ticks(60, 5);
  EXPECT_EQ(status().slabs_over, 0u);
  for (std::uint32_t i = 17; i <= 20; ++i) EXPECT_TRUE(holds(i)) << i;
  expect_sums();
}

TEST_F(Resize, WhatIsHeldKeepsItsSlabsUntilItIsGivenUp) {
  EXPECT_EQ(fill(20, kFormatFloorDense), 20u);  // cannot be quantized
  ASSERT_TRUE(resize(3));
  node.ticks(60, 5);
  EXPECT_EQ(status().slabs_over, 2u);
  EXPECT_EQ(status().level, PressureLevel::refuse);
  EXPECT_EQ(node.store->request_credits(client->id, 1).error().code, Errc::no_memory);
  node.store->withdraw_credits(client->id);
  for (std::uint32_t i = 1; i <= 20; ++i) EXPECT_TRUE(holds(i)) << i;
  expect_sums();
  for (std::uint32_t i = 1; i <= 16; ++i) s.release(i);
  node.ticks(60, 5);
  EXPECT_EQ(status().slabs_over, 0u);
  EXPECT_TRUE(s.want(1)) << "and it serves again";
}

TEST_F(Resize, TheSecondResizeWins) {
  EXPECT_EQ(fill(20, kFormatFloorDense), 20u);
  ASSERT_TRUE(resize(3));
  node.ticks(3);
  ASSERT_TRUE(resize(12));
  node.ticks(3);
  EXPECT_EQ(status().level, PressureLevel::calm);
  EXPECT_EQ(status().slabs_over, 0u);
  EXPECT_TRUE(s.want(8));
  const auto back = resize(8);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->bytes_before, 12 * kSlab);
  expect_sums();
}

TEST_F(Resize, AQuotaStaysAndNoneIsTheArenaAsItIs) {
  const TenantId bound = node.tenant("bound", 2);
  auto other = node.client(bound);
  ASSERT_TRUE(resize(16));
  EXPECT_EQ(node.store->request_credits(other->id, 9).error().code, Errc::over_quota);
  EXPECT_TRUE(s.want(40)) << "more than the arena had at the start";
  EXPECT_EQ(status().tenants[1].quota_bytes, 2 * kSlab);
}

TEST_F(Resize, ANextDaemonOfTheSameConfigurationKeepsTheSize) {
  ASSERT_TRUE(resize(12));
  EXPECT_EQ(fill(36, kFormatFloorDense), 36u);
  die();
  EXPECT_EQ(status().arena_bytes, 12 * kSlab);
  EXPECT_EQ(status().start_bytes, 8 * kSlab);
  for (std::uint32_t i = 1; i <= 36; ++i) EXPECT_TRUE(holds(i)) << i;
  EXPECT_TRUE(s.want(4));
  expect_sums();
}

TEST_F(Resize, ANextDaemonGoesOnToShrink) {
  EXPECT_EQ(fill(24), 24u);
  node.device.hold_jobs = true;
  ASSERT_TRUE(resize(4));
  node.device.hold_jobs = false;
  die();
  EXPECT_EQ(status().target_bytes, 4 * kSlab);
  node.ticks(80, 5);
  EXPECT_EQ(status().slabs_over, 0u);
  for (std::uint32_t i = 1; i <= 24; ++i) EXPECT_TRUE(holds(i)) << i;
  expect_sums();
}

TEST_F(Resize, ANextDaemonOfAnotherConfigurationTakesOverAndHasItsSize) {
  EXPECT_EQ(fill(24), 24u);
  node.slab_count = 5;
  die();
  EXPECT_EQ(status().target_bytes, 5 * kSlab);
  EXPECT_EQ(status().start_bytes, 5 * kSlab);
  node.ticks(80, 5);
  EXPECT_EQ(status().slabs_over, 0u);
  for (std::uint32_t i = 1; i <= 24; ++i) EXPECT_TRUE(holds(i)) << i;
  node.slab_count = 11;
  die();
  EXPECT_EQ(status().arena_bytes, 11 * kSlab);
  node.slab_count = 20;
  die();
  EXPECT_EQ(status().arena_bytes, 16 * kSlab) << "as far as the addresses that clients have reserved";
  const std::string line =
      "event=arena_resized arena_bytes=1048576 arena_bytes_before=720896 why=\"the configuration "
      "asks for 1310720, and no more addresses are reserved: drain and start again for that\"";
  EXPECT_EQ(std::count(node.lines.begin(), node.lines.end(), line), 1);
  die();
  EXPECT_EQ(status().arena_bytes, 16 * kSlab);
  expect_sums();
}

// Nothing is quantized before the arena is full, so that no cold slab has room.
struct ResizeOfDense : Resize {
  ResizeOfDense()
      : Resize([] {
          StoreConfig config = StoreNode::small();
          config.watermarks = {.quantize_at = 0.97, .evict_at = 0.98, .refuse_at = 0.99, .relief = 0.01};
          return config;
        }()) {}
};

TEST_F(ResizeOfDense, ANextDaemonFindsRoomToMakeRoom) {
  EXPECT_EQ(fill(24), 24u);
  EXPECT_EQ(status().counts.all_transcodes(), 0u);
  node.slab_count = 4;
  die();
  node.ticks(80, 5);
  EXPECT_EQ(status().slabs_over, 0u);
  for (std::uint32_t i = 1; i <= 24; ++i) EXPECT_TRUE(holds(i)) << i;
  expect_sums();
}

TEST_F(Resize, AStateWithoutASizeHasThatOfItsRange) {
  void* at = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, node.keeper.held().at("kvq-root").get(), 0);
  ASSERT_NE(at, MAP_FAILED);
  auto& root = *reinterpret_cast<RootRecord*>(static_cast<std::byte*>(at) + sizeof(TableHeader));
  root.size_bytes = root.asked_bytes = 0;
  node.slab_count = 16;
  die();
  EXPECT_EQ(status().arena_bytes, 16 * kSlab);
  for (const std::uint64_t damaged : {17 * kSlab, kSlab + 1}) {
    root.size_bytes = damaged;
    Kept kept = node.keeper.hand_over();
    std::string why;
    MapKeeper keeper;
    const auto device = make_host_device(8 * kSlab, kSlab, run_inline(), 16 * kSlab);
    EXPECT_FALSE(Store::adopt(
        node.config, *device, [](const SlabNotice&) {}, [](const std::string&) {}, keeper, kept, why, node.now_ms));
    EXPECT_EQ(why, "no arena has the size that it names");
  }
  ::munmap(at, 4096);
}

}  // namespace
}  // namespace kvq::testing
