// Numbers that anyone can compute again, and attention as the textbook has it.
#include "tools/kvq-bench/content.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace kvq_bench {
namespace {

constexpr std::uint32_t kLevels = 16, kPage = 64;

// One of 16 levels from -0.9375 to 0.9375, which fp16 has exactly: n / 8 - 0.9375 = (2 n - 15) / 16.
float level(std::uint32_t n) { return (2.0f * static_cast<float>(n) - 15.0f) / 16.0f; }

std::uint16_t half_of_level(std::uint32_t n) {
  const float x = level(n);
  int exponent = 0;
  const float mantissa = std::frexp(std::fabs(x), &exponent);  // x = mantissa * 2^exponent, mantissa in [0.5, 1)
  const auto fraction = static_cast<std::uint16_t>(mantissa * 2048.0f) & 0x3ffu;
  return static_cast<std::uint16_t>((x < 0 ? 0x8000u : 0u) | static_cast<std::uint32_t>(exponent + 14) << 10 |
                                    fraction);
}

double value_of(std::uint16_t half) {
  const double magnitude = std::ldexp(1024 + (half & 0x3ff), ((half >> 10) & 31) - 25);
  return (half & 0x8000u) != 0 ? -magnitude : magnitude;
}

}  // namespace

Content::Content(std::uint32_t count) : tokens(count) {
  std::mt19937 random(count);
  std::uint16_t half[kLevels];
  for (std::uint32_t n = 0; n < kLevels; ++n) half[n] = half_of_level(n);
  k.resize(std::size_t{tokens} * kKvHeads * kHeadDim);
  v.resize(k.size());
  for (std::size_t i = 0; i < k.size(); ++i) {
    const std::size_t channel = i % kHeadDim, place = i / (kHeadDim * kKvHeads) % kPage;
    const std::uint32_t bits = random();
    k[i] = half[place == 0 ? 0 : place == 1 ? kLevels - 1 : bits % kLevels];
    v[i] = half[channel == 0 ? 0 : channel == 1 ? kLevels - 1 : bits / kLevels % kLevels];
  }
  std::uniform_real_distribution<float> query(-4.0f, 4.0f);
  q.resize(kQueryHeads * kHeadDim);
  for (float& x : q) x = query(random);
}

double worst_error(const Content& c, const std::vector<float>& out) {
  double worst = 0;
  for (const std::uint32_t head : {0u, kQueryHeads / 2 + 1, kQueryHeads - 1}) {
    const std::uint32_t kv_head = head / (kQueryHeads / kKvHeads);
    std::vector<double> logit(c.tokens);
    for (std::uint32_t t = 0; t < c.tokens; ++t) {
      const std::uint16_t* key = &c.k[(std::size_t{t} * kKvHeads + kv_head) * kHeadDim];
      for (std::uint32_t i = 0; i < kHeadDim; ++i) logit[t] += double{c.q[head * kHeadDim + i]} * value_of(key[i]);
      logit[t] /= std::sqrt(double{kHeadDim});
    }
    const double highest = *std::max_element(logit.begin(), logit.end());
    double weight = 0;
    std::vector<double> sum(kHeadDim);
    for (std::uint32_t t = 0; t < c.tokens; ++t) {
      const double w = std::exp(logit[t] - highest);
      const std::uint16_t* value = &c.v[(std::size_t{t} * kKvHeads + kv_head) * kHeadDim];
      weight += w;
      for (std::uint32_t i = 0; i < kHeadDim; ++i) sum[i] += w * value_of(value[i]);
    }
    for (std::uint32_t i = 0; i < kHeadDim; ++i) {
      const double error = std::fabs(sum[i] / weight - double{out[head * kHeadDim + i]});
      worst = error > worst || std::isnan(error) ? (std::isnan(error) ? INFINITY : error) : worst;
    }
  }
  return worst;
}

}  // namespace kvq_bench
