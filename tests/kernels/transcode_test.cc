// Transcode on every vector target against the oracle: equal bytes, not close ones.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernel_fixture.h"
#include "kernels/int4_codec.h"

namespace kvq {
namespace {

enum class Fill { normal, constants, one_sided, offset, subnormal, extremes, steps };
constexpr Fill kFills[] = {Fill::normal,    Fill::constants, Fill::one_sided, Fill::offset,
                           Fill::subnormal, Fill::extremes,  Fill::steps};

float draw(Fill fill, std::uint32_t channel, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  switch (fill) {
    case Fill::normal:
      return normal(random) * static_cast<float>(1 + channel % 5);
    case Fill::constants:
      return channel % 3 == 0 ? (random() % 2 != 0 ? 0.0f : -0.0f) : static_cast<float>(channel) * 0.37f;
    case Fill::one_sided:
      return std::fabs(normal(random)) + 2.0f;
    case Fill::offset:
      return 900.0f + 0.5f * normal(random);
    case Fill::subnormal:
      return normal(random) * 0x1p-22f;
    case Fill::extremes:
      return (random() % 2 != 0 ? 1.0f : -1.0f) * (random() % 3 == 0 ? 65280.0f : 60000.0f);
    case Fill::steps:  // many exact ties
      return static_cast<float>(static_cast<int>(random() % 31) - 15) * 0.5f;
  }
  return 0;
}

void fill_dense(Bytes& dense, std::uint32_t d, Dtype dtype, Fill fill, std::mt19937_64& random) {
  for (std::uint32_t part = 0; part < 2; ++part) {
    for (std::uint32_t t = 0; t < kPageTokens; ++t) {
      for (std::uint32_t c = 0; c < d; ++c) {
        dense.halves()[part * kPageTokens * d + dense_index(t, c, d)] = encode(draw(fill, c, random), dtype);
      }
    }
  }
}

TEST(Transcode, EveryTargetWritesTheOraclesBytes) {
  std::mt19937_64 random(test_seed());
  for (const std::uint32_t d : kHeadDims) {
    for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
      for (const Fill fill : kFills) {
        Bytes dense(block_bytes(Format::dense, d));
        fill_dense(dense, d, dtype, fill, random);
        for (const Format f : {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4}) {
          Bytes expected(block_bytes(f, d)), got(block_bytes(f, d), 0xee);
          oracle::quantize_block(f, d, dtype, dense.data, expected.data);
          for (const std::int64_t target : vector_targets()) {
            WithTarget use(target);
            ASSERT_TRUE(quantize_block(f, d, dtype, dense.data, got.data));
            ASSERT_EQ(std::memcmp(expected.data, got.data, got.size), 0)
                << hwy::TargetName(target) << " format " << index_of(f) << " d " << d << " dtype " << int(dtype)
                << " fill " << int(fill);
          }
        }
      }
    }
  }
}

TEST(Transcode, BackToDenseGivesTheDecodedValuesRoundedOnce) {
  std::mt19937_64 random(test_seed() + 1);
  for (const std::uint32_t d : kHeadDims) {
    for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
      for (const Fill fill : {Fill::normal, Fill::extremes, Fill::subnormal}) {
        for (const Format f : {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4}) {
          Bytes dense(block_bytes(Format::dense, d)), block(block_bytes(f, d)), back(dense.size);
          fill_dense(dense, d, dtype, fill, random);
          ASSERT_TRUE(quantize_block(f, d, dtype, dense.data, block.data));
          const oracle::Block exact = oracle::read_block(f, d, dtype, block.data);
          for (const std::int64_t target : vector_targets()) {
            WithTarget use(target);
            dequantize_block(f, d, dtype, block.data, back.data);
            for (std::uint32_t t = 0; t < kPageTokens; ++t) {
              for (std::uint32_t c = 0; c < d; ++c) {
                const std::uint32_t i = dense_index(t, c, d);
                // One fp32 product and one fp32 sum, then one rounding to 16 bits.
                ASSERT_EQ(back.halves()[i], codec_element(static_cast<float>(exact.k[t * d + c]), dtype))
                    << hwy::TargetName(target) << " d " << d << " format " << index_of(f) << " fill " << int(fill)
                    << " token " << t << " channel " << c << " value " << exact.k[t * d + c];
                ASSERT_EQ(back.halves()[kPageTokens * d + i],
                          codec_element(static_cast<float>(exact.v[t * d + c]), dtype));
              }
            }
          }
        }
      }
    }
  }
}

TEST(Transcode, RefusesEveryValueThatIsNotFiniteOrBeyondFp16) {
  std::mt19937_64 random(test_seed() + 2);
  for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
    const std::uint16_t infinity = infinity_bits(dtype), largest = largest_bits(dtype);
    for (const std::uint32_t d : {64u, 80u}) {
      Bytes dense(block_bytes(Format::dense, d)), out(block_bytes(Format::k8v4, d));
      for (int round = 0; round < 100; ++round) {
        fill_dense(dense, d, dtype, Fill::normal, random);
        const std::size_t at = random() % (dense.size / 2);
        const std::uint16_t sign = random() % 2 != 0 ? 0x8000 : 0;
        dense.halves()[at] = sign | largest;
        ASSERT_TRUE(quantize_block(Format::int4, d, dtype, dense.data, out.data));
        for (const std::uint16_t bad : {infinity, std::uint16_t(infinity + 1), std::uint16_t(0x7fff)}) {
          dense.halves()[at] = sign | bad;
          const Result<void> refused = quantize_block(Format::int4, d, dtype, dense.data, out.data);
          ASSERT_EQ(refused.error().code, Errc::invalid_argument);
          ASSERT_STREQ(refused.error().context, "page holds a value that is not finite");
        }
        if (dtype == Dtype::bf16) {
          dense.halves()[at] = sign | std::uint16_t(largest + 1);
          ASSERT_STREQ(quantize_block(Format::k8v4, d, dtype, dense.data, out.data).error().context,
                       "page holds a value beyond fp16");
        }
      }
    }
  }
}

ModelGeometry mixed_model() {
  ModelGeometry g;
  g.layers = 3;
  g.layer[0] = {2, 80, Dtype::fp16, 0};
  g.layer[1] = {1, 128, Dtype::bf16, 1};  // keeps dense
  g.layer[2] = {3, 64, Dtype::bf16, 0};
  return g;
}

void fill_page(const ModelGeometry& g, const PageLayout& dense, Bytes& page, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  for (std::uint32_t layer = 0; layer < g.layers; ++layer) {
    const LayerPlace& at = dense.layer[layer];
    for (std::uint64_t i = 0; i < at.head_bytes * g.layer[layer].kv_heads / 2; ++i) {
      page.halves()[at.offset_bytes / 2 + i] = encode(normal(random), g.layer[layer].dtype);
    }
  }
}

TEST(Transcode, PageGoesThroughBlockByBlockAndKeptLayersAreCopied) {
  std::mt19937_64 random(test_seed() + 3);
  const ModelGeometry g = mixed_model();
  const PageLayout dense = make_layout(g, Format::dense);
  Bytes page(dense.page_bytes, 0);
  fill_page(g, dense, page, random);
  for (const Format f : {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4}) {
    const PageLayout to = make_layout(g, f);
    Bytes out(to.page_bytes), expected(to.page_bytes, 0), back(dense.page_bytes);
    ASSERT_TRUE(transcode_page(g, dense, page.data, to, out.data));
    for (std::uint32_t layer = 0; layer < g.layers; ++layer) {
      for (std::uint32_t head = 0; head < g.layer[layer].kv_heads; ++head) {
        const std::byte* in = page.data + dense.layer[layer].offset_bytes + head * dense.layer[layer].head_bytes;
        std::byte* at = expected.data + to.layer[layer].offset_bytes + head * to.layer[layer].head_bytes;
        if (g.layer[layer].keep_dense != 0) {
          std::memcpy(at, in, dense.layer[layer].head_bytes);
        } else {
          oracle::quantize_block(f, g.layer[layer].head_dim, g.layer[layer].dtype, in, at);
        }
      }
    }
    EXPECT_EQ(std::memcmp(out.data, expected.data, out.size), 0);
    ASSERT_TRUE(transcode_page(g, to, out.data, dense, back.data));
    const LayerPlace& kept = dense.layer[1];
    EXPECT_EQ(std::memcmp(back.data + kept.offset_bytes, page.data + kept.offset_bytes, kept.head_bytes), 0);
    Bytes copy(to.page_bytes);
    ASSERT_TRUE(transcode_page(g, to, out.data, to, copy.data));
    EXPECT_EQ(std::memcmp(copy.data, out.data, copy.size), 0);
  }
}

TEST(Transcode, RefusesLayoutsItDoesNotKnow) {
  const ModelGeometry g = mixed_model();
  const PageLayout int4 = make_layout(g, Format::int4), k8v4 = make_layout(g, Format::k8v4);
  Bytes a(k8v4.page_bytes), b(k8v4.page_bytes);
  EXPECT_EQ(transcode_page(g, int4, a.data, k8v4, b.data).error().code, Errc::invalid_argument);
  PageLayout unknown = int4;
  unknown.format = static_cast<Format>(9);
  EXPECT_EQ(transcode_page(g, int4, a.data, unknown, b.data).error().code, Errc::wrong_layout);
  ModelGeometry odd = g;
  odd.layer[0].head_dim = 100;
  EXPECT_EQ(transcode_page(odd, int4, a.data, int4, b.data).error().code, Errc::wrong_layout);
}

TEST(Transcode, PaddingIsZeroAndNeverPartOfARange) {
  // d = 80 pads the block, and its values are far from zero: a padding lane in a range would show in scale and mid.
  Bytes dense(block_bytes(Format::dense, 80)), out(block_bytes(Format::int4, 80), 0xee);
  for (std::size_t i = 0; i < dense.size / 2; ++i)
    dense.halves()[i] = encode(100.0f + static_cast<float>(i % 2), Dtype::fp16);
  ASSERT_TRUE(quantize_block(Format::int4, 80, Dtype::fp16, dense.data, out.data));
  const BlockOffsets at = block_offsets(Format::int4, 80);
  for (std::uint32_t t = 0; t < kPageTokens; ++t) {
    std::uint16_t scale, mid;
    std::memcpy(&scale, out.data + at.v_scale + 2 * scale_index(t, kPageTokens), 2);
    std::memcpy(&mid, out.data + at.v_mid + 2 * mid_index(t, kPageTokens), 2);
    EXPECT_EQ(scale, float_to_half(1.0f / 15.0f));
    EXPECT_EQ(mid, float_to_half(100.5f));
  }
  for (std::uint32_t i = at.v_mid + 128; i < at.end; ++i) EXPECT_EQ(out.data[i], std::byte{0});
}

}  // namespace
}  // namespace kvq
