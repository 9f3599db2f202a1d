// Rings and steps over a segment in this process's memory.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "client/last_error.h"
#include "client/rings.h"
#include "client/steps.h"

namespace kvq::client {
namespace {

class SegmentTest : public ::testing::Test {
 protected:
  ~SegmentTest() override { ::close(doorbell_); }
  bool rung() {
    std::uint64_t count = 0;
    return ::read(doorbell_, &count, sizeof(count)) > 0;
  }
  // As the daemon does.
  void give(std::uint32_t pages) {
    for (std::uint32_t i = 0; i < pages; ++i) {
      const std::uint64_t at = segment_->magazine.produced.load();
      segment_->magazine.item[at % kMagazineSlots] = {PageId{static_cast<std::uint32_t>(at) + 1}, 7, 0};
      segment_->magazine.produced.store(at + 1);
    }
  }

  std::unique_ptr<Segment> segment_ = std::make_unique<Segment>();
  std::unique_ptr<DirectoryHeader> directory_ = std::make_unique<DirectoryHeader>();
  const int doorbell_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  Rings rings_{*segment_, doorbell_};
  Steps steps_{*segment_, *directory_};
};

TEST_F(SegmentTest, CreditsComeOutInOrderAcrossTheRingsEnd) {
  for (std::uint32_t round = 0; round < 3; ++round) {
    give(kMagazineSlots / 2 + 1);
    EXPECT_EQ(rings_.credits(), kMagazineSlots / 2 + 1);
    while (rings_.credits() > 0) {
      const std::uint64_t expected = segment_->magazine.consumed.load() + 1;
      EXPECT_EQ(raw(rings_.pop_credit().page), expected);
    }
  }
}

TEST_F(SegmentTest, DoorbellRingsOnceBelowHalfTheTargetUntilTheDaemonAnswers) {
  segment_->daemon.credits_target.store(8);
  give(8);
  ASSERT_TRUE(rings_.has_credits(8));
  for (int i = 0; i < 4; ++i) rings_.pop_credit();
  rings_.wake_daemon_if_needed();
  EXPECT_FALSE(rung());
  rings_.pop_credit();
  rings_.wake_daemon_if_needed();
  EXPECT_TRUE(rung());
  rings_.pop_credit();
  rings_.wake_daemon_if_needed();
  EXPECT_FALSE(rung());
  give(1);
  rings_.wake_daemon_if_needed();
  EXPECT_TRUE(rung());
}

TEST_F(SegmentTest, DoorbellRingsWhenTheCommandRingIsMoreThanHalfFull) {
  for (std::uint32_t i = 0; i < kCommandSlots / 2; ++i) rings_.push({.kind = CommandKind::commit});
  rings_.wake_daemon_if_needed();
  EXPECT_FALSE(rung());
  rings_.push({.kind = CommandKind::commit});
  rings_.wake_daemon_if_needed();
  EXPECT_TRUE(rung());
  EXPECT_TRUE(rings_.has_room(kCommandSlots / 2 - 1));
  EXPECT_FALSE(rings_.has_room(kCommandSlots / 2));
}

TEST_F(SegmentTest, StepStoresItsEpochAndEndsOnce) {
  directory_->epoch.store(41);
  std::uint64_t step = 0;
  ASSERT_EQ(steps_.begin(step), KVQ_OK);
  const StepSlot& slot = segment_->step[step % kStepSlots];
  EXPECT_EQ(slot.epoch.load(), 41u);
  EXPECT_EQ(slot.begun.load(), step);
  EXPECT_NE(slot.ended.load(), step);
  EXPECT_EQ(steps_.end(step), KVQ_OK);
  EXPECT_EQ(slot.ended.load(), step);
  EXPECT_EQ(steps_.end(step), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(steps_.end(0), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(steps_.end(step + 1), KVQ_ERR_INVALID_ARGUMENT);
}

TEST_F(SegmentTest, SixtyFourStepsMayBeOpenAndOneMoreIsRefused) {
  std::uint64_t first = 0, step = 0;
  ASSERT_EQ(steps_.begin(first), KVQ_OK);
  for (std::uint32_t i = 1; i < kStepSlots; ++i) ASSERT_EQ(steps_.begin(step), KVQ_OK);
  EXPECT_EQ(steps_.begin(step), KVQ_ERR_LIMIT_REACHED);
  EXPECT_NE(std::strstr(last_error(), "64 steps are open"), nullptr) << last_error();
  EXPECT_EQ(steps_.open(), kStepSlots);
  ASSERT_EQ(steps_.end(first), KVQ_OK);
  EXPECT_EQ(steps_.begin(step), KVQ_OK);
}

TEST_F(SegmentTest, LongStepHoldsUpNobody) {
  std::uint64_t slow = 0, step = 0;
  ASSERT_EQ(steps_.begin(slow), KVQ_OK);
  for (std::uint32_t i = 0; i < 3 * kStepSlots; ++i) {
    ASSERT_EQ(steps_.begin(step), KVQ_OK) << last_error();
    ASSERT_NE(step % kStepSlots, slow % kStepSlots);
    ASSERT_EQ(steps_.end(step), KVQ_OK);
  }
  EXPECT_EQ(steps_.end(slow), KVQ_OK);
}

}  // namespace
}  // namespace kvq::client
