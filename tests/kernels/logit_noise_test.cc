// The noise that kvqd reports is the oracle's, for every format and head size, and says what it promises.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>

#include "kernel_fixture.h"
#include "kernels/logit_noise.h"

namespace kvq {
namespace {

// By the definition in host_kernels.h, over blocks as the oracle reads them.
double oracle_noise(const std::deque<Bytes>& dense, const std::deque<Bytes>& cold, Format format, std::uint32_t d,
                    Dtype dtype) {
  double noise = 0, signal = 0;
  for (std::size_t head = 0; head < dense.size(); ++head) {
    const std::vector<double> was = oracle::read_block(Format::dense, d, dtype, dense[head].data).k;
    const std::vector<double> is = oracle::read_block(format, d, dtype, cold[head].data).k;
    for (std::uint32_t c = 0; c < d; ++c) {
      double mean = 0, mean_error = 0;
      for (std::uint32_t t = 0; t < kPageTokens; ++t) {
        mean += was[t * d + c] / kPageTokens;
        mean_error += (is[t * d + c] - was[t * d + c]) / kPageTokens;
      }
      for (std::uint32_t t = 0; t < kPageTokens; ++t) {
        noise += std::pow(is[t * d + c] - was[t * d + c] - mean_error, 2);
        signal += std::pow(was[t * d + c] - mean, 2);
      }
    }
  }
  return std::sqrt(noise / signal);
}

struct Layer {
  LayerSpec spec;
  std::deque<Bytes> dense, cold;  // by head
  std::vector<std::byte> before, after;
};

Layer make_layer(std::uint32_t heads, std::uint32_t d, Dtype dtype, Format format, float bias,
                 std::mt19937_64& random) {
  Layer out;
  out.spec = {static_cast<std::uint16_t>(heads), static_cast<std::uint16_t>(d), dtype, 0};
  std::normal_distribution<float> normal;
  for (std::uint32_t head = 0; head < heads; ++head) {
    out.dense.emplace_back(block_bytes(Format::dense, d));
    out.cold.emplace_back(block_bytes(format, d));
    for (std::uint32_t i = 0; i < 2 * kPageTokens * d; ++i) {
      out.dense.back().halves()[i] = encode(bias + normal(random) * static_cast<float>(1 + head), dtype);
    }
    KVQ_ASSERT(static_cast<bool>(quantize_block(format, d, dtype, out.dense.back().data, out.cold.back().data)));
    out.before.insert(out.before.end(), out.dense.back().data, out.dense.back().data + block_bytes(Format::dense, d));
    out.after.insert(out.after.end(), out.cold.back().data, out.cold.back().data + block_bytes(format, d));
  }
  return out;
}

double noise_of(const Layer& layer, Format format) {
  const std::uint32_t d = layer.spec.head_dim;
  const LayerPlace dense{.head_bytes = block_bytes(Format::dense, d), .format = Format::dense};
  const LayerPlace cold{.head_bytes = block_bytes(format, d), .format = format};
  return logit_noise(layer.spec, dense, layer.before.data(), cold, layer.after.data());
}

TEST(LogitNoise, IsTheOraclesForEveryFormatAndHeadSize) {
  std::mt19937_64 random(test_seed());
  for (const std::uint32_t d : kHeadDims) {
    for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
      for (const Format format : {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4}) {
        const std::uint32_t heads = 1 + random() % 3;
        const Layer layer = make_layer(heads, d, dtype, format, 0, random);
        const double expected = oracle_noise(layer.dense, layer.cold, format, d, dtype);
        // A decoded element is rounded to the model's type, which the oracle does not do: part of bf16's 2^-9.
        EXPECT_NEAR(noise_of(layer, format), expected, (dtype == Dtype::fp16 ? 0.0005 : 0.004)) << d;
      }
    }
  }
}

TEST(LogitNoise, TellsFormatsApartAndForgetsWhatIsEqualForAllTokens) {
  std::mt19937_64 random(test_seed());
  const auto noise = [&](Format format, float bias) {
    return noise_of(make_layer(8, 128, Dtype::fp16, format, bias, random), format);
  };
  EXPECT_NEAR(noise(Format::int4, 0), 0.09, 0.01);  // the number of docs/monitoring/README.md
  EXPECT_NEAR(noise(Format::k8v4, 0), 0.006, 0.002);
  EXPECT_LT(noise(Format::int4_k8, 0), noise(Format::int4, 0));
  EXPECT_NEAR(noise(Format::int4, 20), 0.09, 0.01) << "a bias is no signal, and costs nothing";
}

TEST(LogitNoise, ConstantKeysHaveNone) {
  std::mt19937_64 random(test_seed());
  Layer layer = make_layer(1, 64, Dtype::fp16, Format::int4, 0, random);
  std::fill_n(reinterpret_cast<std::uint16_t*>(layer.before.data()), kPageTokens * 64, std::uint16_t{0x3c00});
  ASSERT_TRUE(quantize_block(Format::int4, 64, Dtype::fp16, layer.before.data(), layer.after.data()));
  EXPECT_EQ(noise_of(layer, Format::int4), 0);
}

}  // namespace
}  // namespace kvq
