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

}  // namespace
}  // namespace kvq::testing
