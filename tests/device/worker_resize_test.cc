// The arena of a GPU grows and shrinks: its worker makes slabs and gives them back, and nobody waits for it.
#include <gmock/gmock.h>

#include "tests/device/worker_fixture.h"

namespace kvq::testing {
namespace {

using ::testing::HasSubstr;

using WorkerResize = WorkerTest;

TEST_F(WorkerResize, AGrownArenaGetsItsSlabsAndAShrunkOneGivesThemBack) {
  start();
  if (device == nullptr) return;
  turn();
  EXPECT_EQ(device->most_bytes(), std::uint64_t{1} << 30) << "all of the GPU";
  timed([&] { device->resize((kSlabs + 3) * kSlab); });
  ASSERT_TRUE(until([&] { return device->health().held_bytes == (kSlabs + 3) * kSlab; }));
  for (std::uint32_t i = 0; i < kSlabs + 3; ++i) ASSERT_TRUE(device->create_slab(SlabId{i})) << i;
  EXPECT_FALSE(device->create_slab(SlabId{kSlabs + 3}));
  timed([&] { device->resize(2 * kSlab); });
  turn();
  EXPECT_EQ(device->health().held_bytes, (kSlabs + 3) * kSlab) << "what is there stays";
  for (std::uint32_t i = 0; i < kSlabs + 2; ++i) device->destroy_slab(SlabId{i});
  ASSERT_TRUE(until([&] { return device->health().held_bytes == 2 * kSlab; }));
  EXPECT_FALSE(until([&] { return device->health().held_bytes != 2 * kSlab; }, 100));
  fill(SlabId{kSlabs + 2}, 0x3111);
  submit((kSlabs + 2) * kSlab, (kSlabs + 2) * kSlab + 32768);
  ASSERT_TRUE(settled());
  EXPECT_EQ(last_error[1].code, Errc::ok);
}

TEST_F(WorkerResize, ANextWorkerHasTheSizeAsItIs) {
  start();
  if (device == nullptr) return;
  turn();
  device->resize((kSlabs + 2) * kSlab);
  ASSERT_TRUE(until([&] { return device->health().held_bytes == (kSlabs + 2) * kSlab; }));
  signal(SIGKILL);
  ASSERT_TRUE(until([&] { return device->health().restarts == 1 && !device->health().degraded; }));
  ASSERT_TRUE(until([&] { return device->health().held_bytes == (kSlabs + 2) * kSlab; }));
}

TEST_F(WorkerResize, WhatTheGpuHasNoRoomForIsSaid) {
  faults("slabs=8");
  start();
  if (device == nullptr) return;
  turn();
  device->resize(20 * kSlab);
  ASSERT_TRUE(until([&] { return device->health().degraded; }));
  EXPECT_THAT(device->health().text, HasSubstr("the GPU has no room for 12 of 20 slabs"));
  device->resize(kSlabs * kSlab);
  EXPECT_TRUE(settled());
  EXPECT_EQ(device->health().held_bytes, kSlabs * kSlab);
}

TEST_F(WorkerResize, OneAllocationKeepsItsSize) {
  faults("legacy=1");
  start();
  if (device == nullptr) return;
  EXPECT_FALSE(device->can_resize());
  EXPECT_EQ(device->most_bytes(), device->arena_bytes());
}

}  // namespace
}  // namespace kvq::testing
