// The integer rules, group by group, with the inputs that broke other quantizers.
#include "kernels/int4_codec.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernel_fixture.h"

namespace kvq {
namespace {

TEST(Half, AllBitPatternsRoundTripAndMatchTheDefinition) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto h = static_cast<std::uint16_t>(bits);
    const float f = half_to_float(h);
    const double exact = oracle::decode_element(h, Dtype::fp16);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(f));
      ASSERT_TRUE(std::isnan(half_to_float(float_to_half(f))));
      continue;
    }
    ASSERT_EQ(double{f}, exact);
    ASSERT_EQ(float_to_half(f), h);
    ASSERT_EQ(oracle::encode_half(f), h);
  }
}

TEST(Half, RoundsHalfToEvenBetweenAllNeighbours) {
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = oracle::decode_element(static_cast<std::uint16_t>(bits), Dtype::fp16);
    const double high = oracle::decode_element(static_cast<std::uint16_t>(bits + 1), Dtype::fp16);
    const float middle = static_cast<float>((low + high) / 2);
    const auto even = static_cast<std::uint16_t>(bits + (bits & 1));
    ASSERT_EQ(float_to_half(middle), even);
    ASSERT_EQ(float_to_half(-middle), even | 0x8000);
    ASSERT_EQ(float_to_half(std::nextafter(middle, 1e9f)), bits + 1);
    ASSERT_EQ(float_to_half(std::nextafter(middle, -1e9f)), bits);
  }
  EXPECT_EQ(float_to_half(65519.996f), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
}

struct Case {
  const char* name;
  float min, max;
};

// Every value decodes to within half a step plus what rounding the pair to fp16 costs: the midpoint by half a unit in
// the last place, the scale by 2^-11 of itself (or 2^-25 when subnormal), seven and a half times.
double error_bound(float min, float max, CodecPair pair, double top) {
  const double scale = oracle::decode_element(pair.scale, Dtype::fp16);
  const double mid_ulp = std::max(std::fabs((double(min) + max) / 2) * 0x1p-11, 0x1p-25);
  const double true_scale = (double(max) - min) / top;
  const double scale_loss = top / 2 * std::max(true_scale * 0x1p-11, 0x1p-25);
  return std::max(scale, true_scale) / 2 * (1 + 1e-6) + mid_ulp + scale_loss;
}

TEST(Codec, ErrorIsBoundedForEveryKindOfGroup) {
  const Case cases[] = {{"symmetric", -1, 1},
                        {"one-sided above", 3, 5},
                        {"one-sided below", -5, -3},
                        {"offset far larger than range", 1000, 1000.5f},
                        {"offset at the end of fp16", 65440, 65504},
                        {"all of fp16", -65504, 65504},
                        {"subnormals", 0x1p-24f, 0x1p-15f},
                        {"scale underflows", 0, 0x1p-24f},
                        {"smallest scale", 0, 15 * 0x1p-24f},
                        {"constant", 2.5f, 2.5f},
                        {"constant zero", 0, 0},
                        {"zeros of both signs", -0.0f, 0.0f},
                        {"tiny bf16", 1e-38f, 3e-38f}};
  for (const Case& c : cases) {
    for (const float top : {kTop4, kTop8}) {
      const CodecPair pair = codec_pair(c.min, c.max, top);
      ASSERT_LT(pair.scale, 0x7c00) << c.name;  // finite, and never negative
      ASSERT_LT(pair.mid & 0x7fff, 0x7c00) << c.name;
      for (int i = 0; i <= 1000; ++i) {
        const float x = c.min + (c.max - c.min) * static_cast<float>(i) / 1000.0f;
        const std::uint32_t code = codec_code(x, pair, top);
        ASSERT_LE(code, top) << c.name;
        ASSERT_LE(std::fabs(double{codec_value(code, pair, top)} - x), error_bound(c.min, c.max, pair, top))
            << c.name << " top " << top << " x " << x;
      }
    }
  }
}

TEST(Codec, ConstantGroupIsExactWithScaleZero) {
  for (std::uint32_t bits = 0; bits < 0x7c00; bits += 7) {
    const float x = half_to_float(static_cast<std::uint16_t>(bits));
    const CodecPair pair = codec_pair(x, x, kTop4);
    ASSERT_EQ(pair.scale, 0);
    ASSERT_EQ(codec_code(x, pair, kTop4), 0u);
    ASSERT_EQ(codec_value(0, pair, kTop4), x);
  }
}

TEST(Codec, AllCodesAreUsedAndTiesGoToEven) {
  const CodecPair pair = codec_pair(-7.5f, 7.5f, kTop4);
  ASSERT_EQ(half_to_float(pair.scale), 1.0f);
  ASSERT_EQ(half_to_float(pair.mid), 0.0f);
  for (std::uint32_t code = 0; code < 16; ++code) {
    EXPECT_EQ(codec_code(static_cast<float>(code) - 7.5f, pair, kTop4), code);
    // Halfway to the next code: the even one.
    if (code < 15) {
      EXPECT_EQ(codec_code(static_cast<float>(code) - 7.0f, pair, kTop4), code + code % 2);
    }
  }
  EXPECT_EQ(codec_code(-100, pair, kTop4), 0u);
  EXPECT_EQ(codec_code(100, pair, kTop4), 15u);
}

TEST(Codec, QuantizingIsNotTheIdentity) {
  const CodecPair pair = codec_pair(0, 1, kTop4);
  double error = 0;
  for (int i = 0; i < 64; ++i) {
    const float x = static_cast<float>(i) / 64;
    error += std::fabs(codec_value(codec_code(x, pair, kTop4), pair, kTop4) - x);
  }
  EXPECT_GT(error / 64, 0.01);
}

TEST(Codec, DecodedElementStaysFinite) {
  const CodecPair pair = codec_pair(-65504, 65504, kTop4);
  for (std::uint32_t code = 0; code < 16; ++code) {
    EXPECT_LT(codec_element(codec_value(code, pair, kTop4), Dtype::fp16) & 0x7fff, 0x7c00);
  }
}

}  // namespace
}  // namespace kvq
