// The CUDA transcoder against the host's and the oracle's bytes: equal, not close, and nothing else touched.
#include "tests/kernels/cuda/transcode_fixture.h"

namespace kvq {
namespace {

constexpr Format kQuantized[] = {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4};

// dense -> f, f -> dense, both copies, for pages of every fill.
void every_pair(const ModelGeometry& g, std::mt19937_64& random, auto&& as_host) {
  const PageLayout dense = make_layout(g, Format::dense);
  std::vector<Content> pages;
  for (const Fill fill : kFills) pages.push_back(dense_page(g, dense, fill, random));
  as_host(dense, dense, pages);
  for (const Format f : kQuantized) {
    SCOPED_TRACE("format " + std::to_string(static_cast<int>(f)));
    const PageLayout to = make_layout(g, f);
    const std::vector<Content> packed = as_host(dense, to, pages);
    as_host(to, dense, packed);
    as_host(to, to, packed);
  }
}

TEST_F(GpuTranscode, WritesTheHostsBytesForEveryPairHeadSizeAndType) {
  std::mt19937_64 random(test_seed());
  for (const std::uint32_t d : kHeadDims) {
    for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
      SCOPED_TRACE("d " + std::to_string(d) + " dtype " + std::to_string(static_cast<int>(dtype)));
      const ModelGeometry g = uniform(1 + random() % 3, static_cast<std::uint16_t>(1 + random() % 3), d, dtype);
      every_pair(g, random, [&](const PageLayout& from, const PageLayout& to, const std::vector<Content>& pages) {
        return expect_as_host(g, from, to, pages);
      });
      if (HasFailure()) return;
    }
  }
}

TEST_F(GpuTranscode, WritesTheHostsBytesForOddMixesOfLayers) {
  std::mt19937_64 random(test_seed() + 1);
  for (int round = 0; round < 8; ++round) {
    const ModelGeometry g = odd_geometry(1 + random() % 5, 3, random);
    every_pair(g, random, [&](const PageLayout& from, const PageLayout& to, const std::vector<Content>& pages) {
      return expect_as_host(g, from, to, pages);
    });
    if (HasFailure()) return;
  }
}

TEST_F(GpuTranscode, TakesLayersThatKeepDenseThroughTheCommonCase) {
  std::mt19937_64 random(test_seed() + 2);
  for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
    for (const std::uint16_t d : {std::uint16_t{64}, std::uint16_t{128}}) {
      ModelGeometry g = uniform(4, 2, d, dtype);
      g.layer[0] = {3, 256, Dtype::fp16, 1};
      g.layer[3] = {1, 80, Dtype::bf16, 1};
      const PageLayout dense = make_layout(g, Format::dense);
      std::vector<Content> pages;
      for (const Fill fill : kFills) pages.push_back(dense_page(g, dense, fill, random));
      expect_as_host(g, dense, make_layout(g, Format::int4), pages);
    }
  }
}

TEST_F(GpuTranscode, WritesTheHostsBytesForMillionsOfValues) {
  // Values near a tie between two codes are rare, and where the short way to a code would go wrong first.
  std::mt19937_64 random(test_seed() + 7);
  for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
    const ModelGeometry g = uniform(4, 4, 128, dtype);
    const PageLayout dense = make_layout(g, Format::dense);
    std::vector<Content> pages;
    for (int i = 0; i < 24; ++i) {
      pages.push_back(dense_page(g, dense, i % 2 == 0 ? Fill::exponents : Fill::normal, random));
    }
    expect_as_host(g, dense, make_layout(g, Format::int4), pages);
  }
}

TEST_F(GpuTranscode, WritesTheOraclesBlocks) {
  std::mt19937_64 random(test_seed() + 3);
  for (const std::uint32_t d : kHeadDims) {
    for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
      const ModelGeometry g = uniform(1, 1, d, dtype);
      const PageLayout dense = make_layout(g, Format::dense);
      for (const Fill fill : {Fill::normal, Fill::steps, Fill::exponents}) {
        const Content page = dense_page(g, dense, fill, random);
        for (const Format f : kQuantized) {
          const PageLayout to = make_layout(g, f);
          Slots in(1, dense.page_bytes), out(1, to.page_bytes);
          in.put(0, page);
          ASSERT_EQ(run(g, dense, &to, {{in.at(0), out.at(0)}})[0].code, Errc::ok);
          Content expected(to.page_bytes);
          oracle::quantize_block(f, d, dtype, page.data(), expected.data());
          const Content got = out.get(0);
          ASSERT_TRUE(got == expected) << first_difference(g, to, got, expected) << " fill " << static_cast<int>(fill);
        }
      }
    }
  }
}

TEST_F(GpuTranscode, KeepsTheWidestChannelsThoughTheLastBitDecides) {
  std::mt19937_64 random(test_seed() + 8);
  for (const std::uint32_t d : kHeadDims) {
    for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
      const ModelGeometry g = uniform(1, 6, d, dtype);
      const PageLayout dense = make_layout(g, Format::dense);
      std::vector<Content> pages;
      for (const std::uint32_t steps : {1u, 2u, 100u}) {  // different ranges: all the same, a few, nearly one a channel
        Content page = dense_page(g, dense, Fill::normal, random);
        for (std::uint32_t head = 0; head < 6; ++head) {
          auto* keys = reinterpret_cast<std::uint16_t*>(page.data() + head * dense.layer[0].head_bytes);
          for (std::uint32_t c = 0; c < d; ++c) {  // 1 + a few times 2^-23
            const float low = -std::ldexp(static_cast<float>(random() % steps), -23);
            const std::uint32_t lowest = random() % kPageTokens, highest = (lowest + 1 + random() % 63) % kPageTokens;
            for (std::uint32_t t = 0; t < kPageTokens; ++t) {
              keys[dense_index(t, c, d)] = encode(t == lowest ? low : t == highest ? 1.0f : 0.5f, dtype);
            }
          }
        }
        pages.push_back(page);
      }
      for (const Format f : {Format::int4_k4, Format::int4_k8}) expect_as_host(g, dense, make_layout(g, f), pages);
      if (HasFailure()) return;
    }
  }
}

TEST_F(GpuTranscode, TakesAModelOfManyUnlikeLayers) {
  std::mt19937_64 random(test_seed() + 4);
  const ModelGeometry g = odd_geometry(kMaxLayers, 2, random);
  const PageLayout dense = make_layout(g, Format::dense), to = make_layout(g, Format::int4_k8);
  const std::vector<Content> packed = expect_as_host(
      g, dense, to, {dense_page(g, dense, Fill::normal, random), dense_page(g, dense, Fill::steps, random)});
  expect_as_host(g, to, dense, packed);
}

TEST_F(GpuTranscode, TakesBatchesAtTheLimitAndSumsUpEachPageAlone) {
  std::mt19937_64 random(test_seed() + 5);
  const ModelGeometry g = uniform(3, 3, 64, Dtype::fp16);  // 9 blocks a page, which no number of CTAs divides
  const PageLayout dense = make_layout(g, Format::dense), int4 = make_layout(g, Format::int4);
  std::vector<Content> pages;
  for (std::uint32_t i = 0; i < 37; ++i) pages.push_back(dense_page(g, dense, kFills[i % 8], random));
  Slots in(pages.size(), dense.page_bytes), out(kMaxJobs, int4.page_bytes);
  for (std::size_t i = 0; i < pages.size(); ++i) in.put(i, pages[i]);
  std::vector<cuda::PageJob> jobs;
  for (std::uint32_t i = 0; i < kMaxJobs; ++i) {
    jobs.push_back({in.at(i % 37), out.at(i), sum_of(pages[i % 37]), true});
  }
  const std::vector<cuda::PageJobDone> done = run(g, dense, &int4, jobs);
  std::vector<Content> expected;
  for (const Content& page : pages) expected.push_back(host_transcode(g, dense, page, int4));
  for (std::uint32_t i = 0; i < kMaxJobs; ++i) {
    ASSERT_EQ(done[i].code, Errc::ok) << i;
    ASSERT_EQ(done[i].checksum, sum_of(expected[i % 37])) << i;
    ASSERT_TRUE(out.get(i) == expected[i % 37]) << i;
  }
  EXPECT_TRUE(out.gaps_intact());

  const std::vector<cuda::PageJobDone> sums = run(g, dense, nullptr, jobs);
  for (std::uint32_t i = 0; i < kMaxJobs; ++i) ASSERT_EQ(sums[i].checksum, jobs[i].checksum) << i;
}

TEST_F(GpuTranscode, GoesThereAndBackAndThereAgainWithoutChange) {
  // Decoded values quantize to themselves where the range is exact: the second int4 page equals the first in its codes'
  // values.
  std::mt19937_64 random(test_seed() + 6);
  const ModelGeometry g = uniform(2, 4, 128, Dtype::fp16);
  const PageLayout dense = make_layout(g, Format::dense), int4 = make_layout(g, Format::int4);
  Content page(dense.page_bytes);  // values on a grid of 16 steps, each of which every group has
  for (std::uint32_t block = 0; block < 8; ++block) {
    auto* elements = reinterpret_cast<std::uint16_t*>(page.data() + block * 32768);
    for (std::uint32_t part = 0; part < 2; ++part) {
      for (std::uint32_t t = 0; t < kPageTokens; ++t) {
        for (std::uint32_t c = 0; c < 128; ++c) {
          elements[part * kPageTokens * 128 + dense_index(t, c, 128)] =
              float_to_half((static_cast<float>((t + c + block) % 16) - 7.5f) * 0.25f);
        }
      }
    }
  }
  const std::vector<Content> packed = expect_as_host(g, dense, int4, {page});
  EXPECT_TRUE(expect_as_host(g, int4, dense, packed)[0] == page);
}

}  // namespace
}  // namespace kvq
