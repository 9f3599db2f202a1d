// The pace over a simulated GPU: what it costs those who compute beside it, what it carries, how long a job waits.
#include "daemon/gpu/batch_pace.h"

#include <gtest/gtest.h>

#include <deque>

namespace kvq::gpu {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kPage = 8 << 20, kH200 = 4'800'000'000'000;
constexpr double kTranscodedPerS = 3.4e12;  // of source bytes, on an H200

struct Outcome {
  std::uint32_t bursts = 0;
  std::uint64_t bytes = 0;
  double busy_s = 0;
  PaceTime longest_wait{};
  std::uint64_t largest = 0;  // burst

  // Of the time of a process that computes all the while; 0.4 ms is a switch of contexts.
  double cost(bool in_mps, double seconds) const { return (busy_s + (in_mps ? 0 : bursts * 0.4e-3)) / seconds; }
};

// One second in which every millisecond brings its part of `bytes_per_s`, and the worker looks every 100 us.
Outcome run(bool in_mps, double bytes_per_s, bool urgent = false, std::uint64_t gpu_bytes_per_s = kH200) {
  BatchPace pace(pace_rule(in_mps, gpu_bytes_per_s));
  const double transcoded_per_s = kTranscodedPerS * static_cast<double>(gpu_bytes_per_s) / kH200;
  Outcome out;
  std::deque<std::pair<std::uint64_t, PaceTime>> queue;
  std::uint64_t waiting = 0, in_burst = 0;
  double owed = 0;
  PaceTime free_at{};
  for (PaceTime now{}; now < 1s; now += 100us) {
    if (now % 1ms == 0ns) owed += bytes_per_s / 1000;
    for (; owed >= kPage; owed -= kPage) {
      queue.emplace_back(kPage, now);
      waiting += kPage;
    }
    const bool runs = free_at > now;
    std::uint64_t room = pace.room(now, {waiting, queue.empty() ? now : queue.front().second, urgent}, runs);
    std::uint64_t taken = 0;
    for (; room > 0 && !queue.empty(); queue.pop_front()) {
      room -= std::min(room, queue.front().first);
      taken += queue.front().first;
      out.longest_wait = std::max(out.longest_wait, now - queue.front().second);
    }
    if (taken == 0) continue;
    pace.launched(taken);
    waiting -= taken;
    out.bytes += taken;
    out.bursts += runs ? 0 : 1;
    in_burst = runs ? in_burst + taken : taken;
    out.largest = std::max(out.largest, in_burst);
    const double s = static_cast<double>(taken) / transcoded_per_s;
    out.busy_s += s;
    free_at = std::max(free_at, now) + PaceTime(static_cast<std::int64_t>(s * 1e9));
  }
  return out;
}

TEST(BatchPace, TheFirstBatchWaitsForNothingButWhatIsHandedOutWithIt) {
  for (const bool in_mps : {false, true}) {
    BatchPace pace(pace_rule(in_mps, kH200));
    EXPECT_EQ(pace.room(5s, {0, 5s, false}, false), 0u) << "nothing waits";
    EXPECT_EQ(pace.due({kPage, 5s, false}), in_mps ? 5s : 5s + 1ms);
    EXPECT_GT(pace.room(5s + 1ms, {kPage, 5s, false}, false), 0u);
  }
}

TEST(BatchPace, OneAloneLongAfterTheLastStartsAtOnceToo) {
  BatchPace pace(pace_rule(false, kH200));
  ASSERT_GT(pace.room(1s, {kPage, 0s, false}, false), 0u);
  EXPECT_GT(pace.room(1s + 100ms, {kPage, 1s, false}, false), 0u);
}

TEST(BatchPace, OutsideMpsALargeBurstIsDueAfter25MsAndASmallOneAfter100) {
  BatchPace pace(pace_rule(false, kH200));
  ASSERT_GT(pace.room(1s, {kPage, 0s, false}, false), 0u);
  EXPECT_EQ(pace.room(1s + 24ms, {1 << 30, 1s, false}, false), 0u);
  EXPECT_EQ(pace.due({1 << 30, 1s, false}), 1s + 25ms);
  EXPECT_EQ(pace.room(1s + 99ms, {kPage, 1s, false}, false), 0u);
  EXPECT_EQ(pace.due({kPage, 1s, false}), 1s + 100ms);
  EXPECT_GT(pace.room(1s + 25ms, {1 << 30, 1s, false}, false), 0u);
}

TEST(BatchPace, WhoWaitsForMemoryDoesNotWaitForThePause) {
  BatchPace pace(pace_rule(false, kH200));
  ASSERT_GT(pace.room(1s, {kPage, 0s, false}, false), 0u);
  EXPECT_EQ(pace.room(1s + 5ms, {kPage, 1s + 1ms, false}, false), 0u);
  EXPECT_GT(pace.room(1s + 5ms, {kPage, 1s + 1ms, true}, false), 0u) << "what was submitted before, too";
  for (const bool in_mps : {false, true}) {
    const Outcome o = run(in_mps, 100e9, true);
    EXPECT_LE(o.longest_wait, 3ms) << in_mps;
    EXPECT_GE(o.bytes, 98'000'000'000u) << in_mps;
  }
}

TEST(BatchPace, WhatComesWhileABurstRunsGoesWithItUpToItsBytes) {
  const PaceRule rule = pace_rule(false, kH200);
  BatchPace pace(rule);
  const std::uint64_t room = pace.room(1s, {kPage, 0s, false}, false);
  EXPECT_EQ(room, rule.burst_bytes);
  pace.launched(kPage);
  EXPECT_EQ(pace.room(1s + 1ms, {kPage, 1s, false}, true), room - kPage);
  pace.launched(room);
  EXPECT_EQ(pace.room(1s + 2ms, {kPage, 1s, false}, true), 0u);
  EXPECT_EQ(pace.room(1s + 3ms, {kPage, 1s, false}, false), 0u) << "the burst is over";
}

// Outside MPS the cost is that of the switches and of the bytes; 100 GB/s are 3 % of an H200's time by themselves.
TEST(BatchPace, CarriesWhatIsAskedOfItAtItsPrice) {
  struct Case {
    double bytes_per_s;
    std::uint32_t most_bursts;
    double most_cost, most_cost_in_mps;
    PaceTime longest_wait;
  };
  for (const Case& c :
       {Case{1e9, 11, 0.006, 0.001, 101ms}, Case{10e9, 41, 0.02, 0.004, 27ms}, Case{100e9, 41, 0.048, 0.031, 51ms}}) {
    const Outcome outside = run(false, c.bytes_per_s), inside = run(true, c.bytes_per_s);
    EXPECT_LE(outside.bursts, c.most_bursts);
    EXPECT_LE(outside.cost(false, 1), c.most_cost);
    EXPECT_LE(outside.longest_wait, c.longest_wait);
    EXPECT_LE(inside.cost(true, 1), c.most_cost_in_mps);
    EXPECT_LE(inside.longest_wait, 20ms);
    for (const Outcome* o : {&outside, &inside}) {
      EXPECT_GE(static_cast<double>(o->bytes), c.bytes_per_s * 0.89) << "but for what waits at the end";
    }
  }
}

TEST(BatchPace, HoweverMuchWaitsTheWorkerTakesNoMoreThanItsShare) {
  for (const std::uint64_t gpu : {kH200, std::uint64_t{600'000'000'000}}) {
    for (const bool in_mps : {false, true}) {
      const Outcome o = run(in_mps, 1000e9, false, gpu);
      EXPECT_LE(o.busy_s, 0.034) << gpu << " " << in_mps;
      EXPECT_GE(o.busy_s, 0.028) << gpu << " " << in_mps;
    }
  }
}

TEST(BatchPace, InsideMpsABatchIsSmall) {
  EXPECT_LE(run(true, 100e9).largest, std::uint64_t{142} << 20);
  EXPECT_GE(run(false, 100e9).largest, std::uint64_t{2} << 30);
}

TEST(BatchPace, APageLargerThanABurstGoesAlone) {
  BatchPace pace(pace_rule(true, 1'000'000'000));
  EXPECT_LT(pace_rule(true, 1'000'000'000).burst_bytes, kPage);
  EXPECT_GT(pace.room(1s, {kPage, 0s, false}, false), 0u);
}

}  // namespace
}  // namespace kvq::gpu
