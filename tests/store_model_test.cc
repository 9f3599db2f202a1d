// Seeded random walks of the whole store against a map-based model. KVQ_TEST_SEED repeats one walk.
#include <gtest/gtest.h>

#include <iostream>

#include "tests/support/walk.h"

namespace kvq::testing {
namespace {

Walk::Seen walk(Walk::Options options, int moves) {
  std::cout << "seed " << options.seed << " moves " << moves << std::endl;
  Walk w(options);
  w.run(moves);
  const Walk::Seen seen = w.seen();
  std::cout << "transcodes " << seen.transcodes << " failures " << seen.failures << " drops " << seen.drops
            << " attaches " << seen.attaches << " refusals " << seen.refusals << " deaths " << seen.deaths
            << " int4 reads " << seen.int4_reads << std::endl;
  if (!::testing::Test::HasFailure()) w.finish();
  return seen;
}

TEST(StoreModel, HonestDeviceAndProcessesThatStay) {
  const Walk::Seen seen = walk({.seed = test_seed(11), .deaths = false}, 6000);
  EXPECT_GT(seen.transcodes, 0u);
  EXPECT_GT(seen.int4_reads, 0u);
}

TEST(StoreModel, DelaysFailuresAndDeaths) {
  Walk::Seen sum;
  for (std::uint64_t seed = test_seed(21), last = seed + 4; seed < last; ++seed) {
    const Walk::Seen seen =
        walk({.seed = seed,
              .faults = {.max_delay_polls = 4, .fail_passing = 0.1, .fail_for_good = 0.02, .fail_create = 0.05}},
             6000);
    if (::testing::Test::HasFailure()) return;
    sum.transcodes += seen.transcodes;
    sum.failures += seen.failures;
    sum.drops += seen.drops;
    sum.attaches += seen.attaches;
    sum.deaths += seen.deaths;
  }
  EXPECT_GT(sum.transcodes, 0u);
  EXPECT_GT(sum.failures, 0u);
  EXPECT_GT(sum.drops, 0u);
  EXPECT_GT(sum.attaches, 0u);
  EXPECT_GT(sum.deaths, 0u);
}

TEST(StoreModel, SixSlabsForEverybody) {
  const Walk::Seen seen =
      walk({.seed = test_seed(31), .slabs = 6, .quota_slabs = 3, .faults = {.max_delay_polls = 2}}, 6000);
  EXPECT_GT(seen.transcodes, 0u);
  EXPECT_GT(seen.drops, 0u);
}

TEST(StoreModel, KernelsReadMirrorsThatLagBehind) {
  Walk::Seen sum;
  for (std::uint64_t seed = test_seed(51), last = seed + 4; seed < last; ++seed) {
    const Walk::Seen seen =
        walk({.seed = seed, .slabs = 8, .faults = {.max_delay_polls = 2, .fail_passing = 0.05, .mirror_lag = 4}}, 6000);
    if (::testing::Test::HasFailure()) return;
    sum.transcodes += seen.transcodes;
    sum.int4_reads += seen.int4_reads;
    sum.lagging_reads += seen.lagging_reads;
  }
  EXPECT_GT(sum.transcodes, 0u);
  EXPECT_GT(sum.int4_reads, 0u);
  EXPECT_GT(sum.lagging_reads, 0u);
}

#if defined(KVQ_KILL_POINTS)
TEST(StoreModel, TheDaemonDiesWhileMirrorsLagBehind) {
  executioner = {};
  Walk::Seen sum;
  for (std::uint64_t seed = test_seed(71), last = seed + 4; seed < last; ++seed) {
    const Walk::Seen seen =
        walk({.seed = seed, .faults = {.max_delay_polls = 3, .mirror_lag = 3}, .daemon_dies = true}, 5000);
    if (::testing::Test::HasFailure()) return;
    sum.daemon_deaths += seen.daemon_deaths;
    sum.lagging_reads += seen.lagging_reads;
  }
  EXPECT_GT(sum.daemon_deaths, 50u);
  EXPECT_GT(sum.lagging_reads, 0u);
}

TEST(StoreModel, TheDaemonDiesAtAnyPointAndTheNextOneGoesOn) {
  executioner = {};
  Walk::Seen sum;
  for (std::uint64_t seed = test_seed(41), last = seed + 6; seed < last; ++seed) {
    const Walk::Seen seen =
        walk({.seed = seed, .faults = {.max_delay_polls = 3, .fail_passing = 0.05}, .daemon_dies = true}, 5000);
    if (::testing::Test::HasFailure()) return;
    sum.daemon_deaths += seen.daemon_deaths;
    sum.int4_reads += seen.int4_reads;
    sum.attaches += seen.attaches;
  }
  std::cout << "daemon deaths " << sum.daemon_deaths << ", at points " << executioner.kills << std::endl;
  EXPECT_GT(sum.daemon_deaths, 100u);
  EXPECT_GT(executioner.kills, 100u);
  EXPECT_GT(sum.int4_reads, 0u);
  EXPECT_GT(sum.attaches, 0u);
}

// The points that the store passes by itself; page_quarantined has a test in store_integrity_test.cc, the others belong
// to processes (tests/multiprocess).
constexpr KillPoint kStorePoints[] = {
    KillPoint::command_applied,     KillPoint::command_committed,   KillPoint::credit_committed,
    KillPoint::seal_committed,      KillPoint::attach_committed,    KillPoint::transcode_started,
    KillPoint::transcode_submitted, KillPoint::transcode_published, KillPoint::transcode_committed,
    KillPoint::page_retired,        KillPoint::epoch_advanced,      KillPoint::slot_reaped,
    KillPoint::page_dropped,        KillPoint::slab_made,           KillPoint::slab_kept,
    KillPoint::slab_recorded,       KillPoint::slab_forgotten,      KillPoint::session_kept,
    KillPoint::session_recorded,    KillPoint::sequence_ended,      KillPoint::session_ended,
    KillPoint::adopt_undone,        KillPoint::adopt_checked,       KillPoint::adopt_published};

class DaemonDies : public ::testing::TestWithParam<KillPoint> {};

TEST_P(DaemonDies, AtThisPointAndNothingIsLost) {
  executioner = {};
  for (std::uint64_t seed = test_seed(61), last = seed + 20; executioner.kills < 3 && seed < last; ++seed) {
    walk({.seed = seed, .faults = {.max_delay_polls = 2}, .daemon_dies = true, .dies_at = GetParam()}, 1500);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(executioner.kills, 3u) << "never there";
}

INSTANTIATE_TEST_SUITE_P(StoreModel, DaemonDies, ::testing::ValuesIn(kStorePoints),
                         [](const auto& info) { return std::string(name(info.param)); });
#endif

}  // namespace
}  // namespace kvq::testing
