// Every index function of page_format.h is a bijection, for every head size, and agrees with the drawn order.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "kernel_fixture.h"

namespace kvq {
namespace {

TEST(PageIndex, DenseIndexCoversEveryElementOnce) {
  for (const std::uint32_t d : kHeadDims) {
    std::vector<int> seen(kPageTokens * d);
    for (std::uint32_t t = 0; t < kPageTokens; ++t) {
      for (std::uint32_t c = 0; c < d; ++c) {
        ASSERT_LT(dense_index(t, c, d), seen.size());
        ++seen[dense_index(t, c, d)];
      }
    }
    for (const int count : seen) ASSERT_EQ(count, 1) << d;
  }
}

TEST(PageIndex, CodePlacesCoverEveryNibbleOnce) {
  for (const std::uint32_t d : kHeadDims) {
    std::vector<int> k(kPageTokens * d), v(kPageTokens * d);
    for (std::uint32_t t = 0; t < kPageTokens; ++t) {
      for (std::uint32_t c = 0; c < d; ++c) {
        const CodeAt at_k = k_code_at(t, c), at_v = v_code_at(t, c, d);
        ASSERT_LT(at_k.word * 8 + at_k.shift / 4, k.size());
        ASSERT_LT(at_v.word * 8 + at_v.shift / 4, v.size());
        ++k[at_k.word * 8 + at_k.shift / 4];
        ++v[at_v.word * 8 + at_v.shift / 4];
      }
    }
    for (const int count : k) ASSERT_EQ(count, 1) << d;
    for (const int count : v) ASSERT_EQ(count, 1) << d;
  }
}

TEST(PageIndex, ParameterPlacesCoverEveryItemOnceAndKeepPairsTogether) {
  for (const std::uint32_t count : {64u, 80u, 96u, 128u, 192u, 256u}) {
    std::set<std::uint32_t> scales, mids;
    for (std::uint32_t x = 0; x < count; ++x) {
      scales.insert(scale_index(x, count));
      mids.insert(mid_index(x, count));
      if (x % 2 == 1) {
        EXPECT_EQ(scale_index(x, count), scale_index(x - 1, count) + 1);
        EXPECT_EQ(mid_index(x, count), mid_index(x - 1, count) + 1);
      }
    }
    EXPECT_EQ(scales.size(), count);
    EXPECT_EQ(mids.size(), count);
    EXPECT_EQ(*scales.rbegin(), count - 1);
    EXPECT_EQ(*mids.rbegin(), count - 1);
  }
}

TEST(PageIndex, BlockPartsFollowEachOtherWithoutOverlap) {
  for (const std::uint32_t d : kHeadDims) {
    for (const Format f : kFormats) {
      const BlockOffsets o = block_offsets(f, d);
      EXPECT_EQ(o.end % 128, 0u);
      if (f == Format::dense) continue;
      const std::uint32_t codes = kPageTokens * d / 2;
      EXPECT_EQ(o.k_scale, f == Format::k8v4 ? 2 * codes : codes);
      EXPECT_EQ(o.k_mid, o.k_scale + 2 * d);
      EXPECT_EQ(o.v, o.k_mid + 2 * d);
      EXPECT_EQ(o.v_scale, o.v + codes);
      EXPECT_EQ(o.v_mid, o.v_scale + 128);
      EXPECT_GE(o.end, o.v_mid + 128);
      if (kept_channels(f) != 0) {
        EXPECT_GE(o.channels, o.v_mid + 128);
        EXPECT_EQ(o.end, o.kept + kept_channels(f) * 128);
      }
    }
  }
}

}  // namespace
}  // namespace kvq
