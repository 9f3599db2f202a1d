// Rings and steps over a segment in this process's memory.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

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
  const std::unique_ptr<ModelSide> host_ = make_control_side();
  Steps steps_{*segment_, *directory_, *host_};
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
  EXPECT_EQ(steps_.end(step, nullptr), KVQ_OK);
  EXPECT_EQ(slot.ended.load(), step);
  EXPECT_EQ(steps_.end(step, nullptr), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(steps_.end(0, nullptr), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(steps_.end(step + 1, nullptr), KVQ_ERR_INVALID_ARGUMENT);
}

TEST_F(SegmentTest, SixtyFourStepsMayBeOpenAndOneMoreIsRefused) {
  std::uint64_t first = 0, step = 0;
  ASSERT_EQ(steps_.begin(first), KVQ_OK);
  for (std::uint32_t i = 1; i < kStepSlots; ++i) ASSERT_EQ(steps_.begin(step), KVQ_OK);
  EXPECT_EQ(steps_.begin(step), KVQ_ERR_LIMIT_REACHED);
  EXPECT_NE(std::strstr(last_error(), "64 steps are open"), nullptr) << last_error();
  EXPECT_EQ(steps_.open(), kStepSlots);
  ASSERT_EQ(steps_.end(first, nullptr), KVQ_OK);
  EXPECT_EQ(steps_.begin(step), KVQ_OK);
}

TEST_F(SegmentTest, LongStepHoldsUpNobody) {
  std::uint64_t slow = 0, step = 0;
  ASSERT_EQ(steps_.begin(slow), KVQ_OK);
  for (std::uint32_t i = 0; i < 3 * kStepSlots; ++i) {
    ASSERT_EQ(steps_.begin(step), KVQ_OK) << last_error();
    ASSERT_NE(step % kStepSlots, slow % kStepSlots);
    ASSERT_EQ(steps_.end(step, nullptr), KVQ_OK);
  }
  EXPECT_EQ(steps_.end(slow, nullptr), KVQ_OK);
}

// A GPU whose stream gets as far as the test says.
class FakeStream final : public StepEnder {
 public:
  kvq_status end_step(StepSlot& slot, std::uint64_t serial, void* stream) override {
    if (answer_ != KVQ_OK) return answer_;
    streams_.push_back(stream);
    writes_.emplace_back(&slot, serial);
    return KVQ_OK;
  }
  void run(std::size_t writes) {
    for (; writes > 0; --writes) {
      writes_.front().first->ended.store(writes_.front().second);
      writes_.pop_front();
    }
  }
  kvq_status answer_ = KVQ_OK;
  std::vector<void*> streams_;
  std::deque<std::pair<StepSlot*, std::uint64_t>> writes_;
};

class StreamTest : public SegmentTest {
 protected:
  FakeStream gpu_;
  Steps on_gpu_{*segment_, *directory_, gpu_};
};

TEST_F(StreamTest, StepIsOpenUntilItIsGivenToTheStreamAndRunsUntilTheStreamHasPassedIt) {
  std::uint64_t first = 0, second = 0;
  int stream = 0;
  ASSERT_EQ(on_gpu_.begin(first), KVQ_OK);
  EXPECT_TRUE(on_gpu_.is_open(first));
  ASSERT_EQ(on_gpu_.end(first, &stream), KVQ_OK);
  EXPECT_EQ(gpu_.streams_, std::vector<void*>{&stream});
  EXPECT_EQ(on_gpu_.open(), 0u);
  EXPECT_EQ(on_gpu_.running(), 1u);
  EXPECT_FALSE(on_gpu_.is_open(first));
  EXPECT_FALSE(on_gpu_.is_over(first));
  ASSERT_EQ(on_gpu_.begin(second), KVQ_OK);  // the next one need not wait
  EXPECT_EQ(on_gpu_.open(), 1u);
  ASSERT_EQ(on_gpu_.end(second, &stream), KVQ_OK);
  EXPECT_EQ(on_gpu_.end(second, &stream), KVQ_ERR_INVALID_ARGUMENT);  // given once, though it still runs
  gpu_.run(1);
  EXPECT_TRUE(on_gpu_.is_over(first));
  EXPECT_EQ(on_gpu_.running(), 1u);
  gpu_.run(1);
  EXPECT_EQ(on_gpu_.running(), 0u);
}

TEST_F(StreamTest, SlotOfAStepThatRunsIsNotBegunAgain) {
  std::uint64_t step = 0;
  for (std::uint32_t i = 0; i < kStepSlots; ++i) {
    ASSERT_EQ(on_gpu_.begin(step), KVQ_OK);
    ASSERT_EQ(on_gpu_.end(step, nullptr), KVQ_OK);
  }
  EXPECT_EQ(on_gpu_.begin(step), KVQ_ERR_LIMIT_REACHED);
  EXPECT_NE(std::strstr(last_error(), "64 of them still run on the GPU"), nullptr) << last_error();
  gpu_.run(1);
  EXPECT_EQ(on_gpu_.begin(step), KVQ_OK);
}

TEST_F(StreamTest, RefusedEndLeavesTheStepOpen) {
  std::uint64_t step = 0;
  ASSERT_EQ(on_gpu_.begin(step), KVQ_OK);
  gpu_.answer_ = KVQ_ERR_INVALID_ARGUMENT;
  EXPECT_EQ(on_gpu_.end(step, nullptr), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_TRUE(on_gpu_.is_open(step));
  gpu_.answer_ = KVQ_OK;
  EXPECT_EQ(on_gpu_.end(step, nullptr), KVQ_OK);
}

TEST_F(StreamTest, LostContextEndsWhatRanAndSaysThatItWasCutShort) {
  std::uint64_t done = 0, running = 0, open = 0, last = 0;
  for (std::uint64_t* step : {&done, &running, &open, &last}) ASSERT_EQ(on_gpu_.begin(*step), KVQ_OK);
  ASSERT_EQ(on_gpu_.end(done, nullptr), KVQ_OK);
  ASSERT_EQ(on_gpu_.end(running, nullptr), KVQ_OK);
  gpu_.run(1);
  gpu_.answer_ = KVQ_ERR_CONTEXT_LOST;
  EXPECT_EQ(on_gpu_.end(last, nullptr), KVQ_ERR_CONTEXT_LOST);
  EXPECT_EQ(on_gpu_.open(), 1u);  // another thread's, which it ends itself
  EXPECT_EQ(on_gpu_.running(), 0u);
  EXPECT_EQ(segment_->step[done % kStepSlots].cut_short.load(), 0u);
  for (const std::uint64_t step : {running, last}) {
    EXPECT_TRUE(on_gpu_.is_over(step));
    EXPECT_EQ(segment_->step[step % kStepSlots].cut_short.load(), step);
  }
  EXPECT_EQ(on_gpu_.end(open, nullptr), KVQ_ERR_CONTEXT_LOST);
  EXPECT_EQ(on_gpu_.open(), 0u);
}

}  // namespace
}  // namespace kvq::client
