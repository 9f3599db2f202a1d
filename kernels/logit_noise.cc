// How much a quantized page's keys differ from what they were, as attention sees it.
//
// Invariant: sums are in double over exact element values; the order is fixed, so equal pages give equal numbers.
#include "kernels/logit_noise.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/half.h"
#include "kernels/host_kernels.h"

namespace kvq {
namespace {

struct Sums {
  double noise = 0, signal = 0;
};

// Of the 64 keys of one channel: squares about their means. A constant on all keys moves no weight of a softmax.
Sums channel_sums(const std::uint16_t* before, const std::uint16_t* after, std::uint32_t channel, std::uint32_t d,
                  Dtype dtype) {
  double key = 0, key_square = 0, error = 0, error_square = 0;
  for (std::uint32_t token = 0; token < kPageTokens; ++token) {
    const std::uint32_t at = dense_index(token, channel, d);
    const double was = element_to_float(before[at], dtype), change = element_to_float(after[at], dtype) - was;
    key += was;
    key_square += was * was;
    error += change;
    error_square += change * change;
  }
  return {error_square - error * error / kPageTokens, key_square - key * key / kPageTokens};
}

}  // namespace

float logit_noise(const LayerSpec& spec, const LayerPlace& dense, const std::byte* before, const LayerPlace& cold,
                  const std::byte* after) {
  if (cold.format == Format::dense) return 0;  // a layer that its model keeps
  Sums layer;
  std::vector<std::byte> block(dense.head_bytes);
  for (std::uint32_t head = 0; head < spec.kv_heads; ++head) {
    dequantize_block(cold.format, spec.head_dim, spec.dtype, after + head * cold.head_bytes, block.data());
    const auto* was = reinterpret_cast<const std::uint16_t*>(before + head * dense.head_bytes);
    const auto* is = reinterpret_cast<const std::uint16_t*>(block.data());
    for (std::uint32_t channel = 0; channel < spec.head_dim; ++channel) {
      const Sums sums = channel_sums(was, is, channel, spec.head_dim, spec.dtype);
      layer.noise += sums.noise;
      layer.signal += sums.signal;
    }
  }
  return layer.signal > 0 ? static_cast<float>(std::sqrt(std::max(layer.noise, 0.0) / layer.signal)) : 0.0f;
}

}  // namespace kvq
