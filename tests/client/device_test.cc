// Which GPU a session gets, and what a process is told that cannot have it.
#include "client/device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "client/last_error.h"
#include "client/tenant_memory.h"

namespace kvq::client {
namespace {

const std::vector<std::string> kVisible = {"GPU-1111", "MIG-2222", "GPU-3333"};

TEST(ChooseDevice, TakesTheOneOfThatUuidWhateverItsNumber) {
  std::size_t index = 99;
  ASSERT_EQ(choose_device("GPU-3333", kVisible, nullptr, index), KVQ_OK);
  EXPECT_EQ(index, 2u);
  ASSERT_EQ(choose_device("MIG-2222", kVisible, "1", index), KVQ_OK);
  EXPECT_EQ(index, 1u);
}

TEST(ChooseDevice, NamesTheGpuWhatThereIsAndTheSettingThatHidesIt) {
  std::size_t index = 99;
  EXPECT_EQ(choose_device("GPU-4444", kVisible, "0,1", index), KVQ_ERR_INVALID_ARGUMENT);
  for (const char* part : {"GPU-4444", "GPU-1111, MIG-2222, GPU-3333", "CUDA_VISIBLE_DEVICES is \"0,1\"", "visible"}) {
    EXPECT_NE(std::strstr(last_error(), part), nullptr) << part << ": " << last_error();
  }
  EXPECT_EQ(choose_device("GPU-4444", {}, nullptr, index), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(last_error(), "visible: none"), nullptr) << last_error();
  EXPECT_NE(std::strstr(last_error(), "CUDA_VISIBLE_DEVICES is not set"), nullptr) << last_error();
  EXPECT_EQ(index, 99u);
}

TEST(ChooseServed, TakesTheCurrentGpuElseTheFirstVisibleOneThatIsServed) {
  const std::vector<std::string> served = {"GPU-3333", "MIG-2222", "GPU-9999"};
  std::string uuid;
  ASSERT_EQ(choose_served(served, {.uuids = kVisible}, uuid), KVQ_OK);
  EXPECT_EQ(uuid, "MIG-2222") << "in the order of this process";
  ASSERT_EQ(choose_served(served, {.uuids = kVisible, .current = 2}, uuid), KVQ_OK);
  EXPECT_EQ(uuid, "GPU-3333");
  ASSERT_EQ(choose_served(served, {.uuids = kVisible, .current = 0}, uuid), KVQ_OK);
  EXPECT_EQ(uuid, "MIG-2222") << "the current one is not served";
}

TEST(ChooseServed, NamesBothListsWhenNoneIsInBoth) {
  const std::vector<std::string> served = {"GPU-8888", "GPU-9999"};
  std::string uuid = "as before";
  EXPECT_EQ(choose_served(served, {.uuids = kVisible, .current = 1, .setting = "0,1,2"}, uuid),
            KVQ_ERR_INVALID_ARGUMENT);
  for (const char* part : {"GPU-8888, GPU-9999", "GPU-1111, MIG-2222, GPU-3333", "CUDA_VISIBLE_DEVICES is \"0,1,2\""}) {
    EXPECT_NE(std::strstr(last_error(), part), nullptr) << part << ": " << last_error();
  }
  EXPECT_EQ(choose_served(served, {}, uuid), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(last_error(), "visible: none"), nullptr) << last_error();
  EXPECT_EQ(uuid, "as before");
}

// One slot array of a session, as another thread's kernels would leave it.
TEST(TenantMemory, SlabGoesWhenTheStepsAreOverThatRanWhenItWasAskedFor) {
  const auto memory =
      TenantMemory::of({.daemon_instance = 77, .tenant = TenantId{1}, .arena_bytes = 1 << 20, .slab_bytes = 1 << 16});
  const auto segment = std::make_unique<Segment>();
  memory->watch(SessionId{5}, *segment);
  EXPECT_TRUE(memory->open_steps().empty());
  segment->step[9].begun.store(9);
  const auto steps = memory->open_steps();
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].serial, 9u);
  EXPECT_FALSE(memory->all_over(steps));
  segment->step[9].ended.store(9);
  segment->step[9].begun.store(9 + kStepSlots);  // a later one does not count
  EXPECT_TRUE(memory->all_over(steps));
  EXPECT_FALSE(memory->all_over(memory->open_steps()));
  const auto later = memory->open_steps();
  memory->unwatch(SessionId{5});  // the session ended, and its steps with it
  EXPECT_TRUE(memory->all_over(later));
}

}  // namespace
}  // namespace kvq::client
