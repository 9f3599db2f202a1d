// A quantized block in shared memory -> a dense block in shared memory.
//
// Invariant: every element of the block is written, once but for kept channels, which are written over what their zero
// scale and midpoint gave; a channel list that damage has changed leads nowhere outside the block.
#pragma once

#include "kernels/cuda/matrices.cuh"
#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/page_codec.cuh"

namespace kvq::cuda {

// Parameters of the groups 2 h + e of x = 16 kt + 2 t + e + 8 h, of `count` items.
struct GroupValues {
  float scale[4], mid[4];

  __device__ GroupValues(const std::byte* block, std::uint32_t scale_at, std::uint32_t mid_at, std::uint32_t x,
                         std::uint32_t count) {
#pragma unroll
    for (std::uint32_t h = 0; h < 2; ++h) {
      const auto* s = reinterpret_cast<const std::uint32_t*>(block + scale_at + 2 * scale_index(x + 8 * h, count));
      const auto* m = reinterpret_cast<const std::uint32_t*>(block + mid_at + 2 * mid_index(x + 8 * h, count));
      scale[2 * h] = Pair<Dtype::fp16>::low(*s);
      scale[2 * h + 1] = Pair<Dtype::fp16>::high(*s);
      mid[2 * h] = Pair<Dtype::fp16>::low(*m);
      mid[2 * h + 1] = Pair<Dtype::fp16>::high(*m);
    }
  }

  // The two elements (e = 0, 1) of register j; codes in the low nibble or byte of each half. A code in bits 8 .. 15
  // below the exponent of 2^15 is a float without a conversion.
  template <Dtype kType>
  __device__ std::uint32_t pair(std::uint32_t codes, std::uint32_t j, float center) const {
    constexpr std::uint32_t kExponent = 0x4700'0000u;
    const std::uint32_t g = j / 2 * 2;
    const float low = __uint_as_float(__byte_perm(codes, kExponent, 0x7604)) - (32768.0f + center);
    const float high = __uint_as_float(__byte_perm(codes, kExponent, 0x7624)) - (32768.0f + center);
    return Pair<kType>::round(decode(low, scale[g], mid[g]), decode(high, scale[g + 1], mid[g + 1]));
  }
};

template <Dtype kType>
__device__ __forceinline__ void dequantize_key_tile(const std::byte* block, const Lane& lane, std::uint32_t d,
                                                    const BlockOffsets& at, bool wide, std::uint32_t kt,
                                                    std::uint32_t keys) {
  const GroupValues groups(block, at.k_scale, at.k_mid, 16 * kt + 2 * lane.t, d);
  const uint4 codes = chunk_at(block, at.k + kt * 512 + lane.lane * 16);
  const uint4 low_codes = wide ? chunk_at(block, at.k_low + kt * 512 + lane.lane * 16) : uint4{0, 0, 0, 0};
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const std::uint32_t low_words[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
#pragma unroll
  for (std::uint32_t mt = 0; mt < 4; ++mt) {
    std::uint32_t r[4];
#pragma unroll
    for (std::uint32_t j = 0; j < 4; ++j) {
      std::uint32_t pair = (words[mt] >> (4 * j)) & 0x000f'000fu;
      if (wide) pair = pair << 4 | ((low_words[mt] >> (4 * j)) & 0x000f'000fu);
      r[j] = groups.pair<kType>(pair, j, wide ? 0.5f * kTop8 : 0.5f * kTop4);
    }
    store_matrices(key_matrix(lane, keys, d, kt, mt), r);
  }
}

// Up to four channel tiles, from `first` on, of V tile kt.
template <Dtype kType>
__device__ __forceinline__ void dequantize_value_tiles(const std::byte* block, const Lane& lane, std::uint32_t d,
                                                       const BlockOffsets& at, std::uint32_t kt, std::uint32_t first,
                                                       std::uint32_t values) {
  const GroupValues groups(block, at.v_scale, at.v_mid, 16 * kt + 2 * lane.t, kPageTokens);
  const std::uint32_t tiles = d / 16, width = tiles - first < 4 ? tiles - first : 4;
  const std::byte* codes = block + at.v + (kt * tiles + first) * 128 + lane.lane * 4 * width;
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) {
    if (i >= width) break;
    const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(codes + 4 * i);
    std::uint32_t r[4];
#pragma unroll
    for (std::uint32_t j = 0; j < 4; ++j) r[j] = groups.pair<kType>((word >> (4 * j)) & 0x000f'000fu, j, 0.5f * kTop4);
    store_matrices_transposed(value_matrix(lane, values, d, kt, first + i), r);
  }
}

// All working threads; the block is complete after the barrier at the end.
template <Dtype kType>
__device__ inline void dequantize_block(const std::byte* block, Format format, std::uint32_t d, const Lane& lane,
                                        std::byte* dense) {
  const BlockOffsets at = block_offsets(format, d);
  const std::uint32_t keys = shared_address(dense), values = keys + kPageTokens * d * 2;
  const std::uint32_t key_tiles = d / 16, value_parts = (d + 63) / 64;
  for (std::uint32_t i = lane.warp; i < key_tiles + 4 * value_parts; i += kTranscodeWarps) {
    if (i < key_tiles) {
      dequantize_key_tile<kType>(block, lane, d, at, format == Format::k8v4, i, keys);
    } else {
      const std::uint32_t part = i - key_tiles;
      dequantize_value_tiles<kType>(block, lane, d, at, part % 4, part / 4 * 4, values);
    }
  }
  sync_workers(1, kTranscodeThreads);
  const std::uint32_t kept = kept_channels(format);
  if (kept == 0) return;
  auto* out = reinterpret_cast<std::uint16_t*>(dense);
  const auto* list = reinterpret_cast<const std::uint16_t*>(block + at.channels);
  const auto* elements = reinterpret_cast<const std::uint16_t*>(block + at.kept);
  for (std::uint32_t i = threadIdx.x; i < kept * kPageTokens; i += kTranscodeThreads) {
    const std::uint32_t channel = list[i / kPageTokens];
    if (channel < d) out[dense_index(i % kPageTokens, channel, d)] = elements[i];
  }
  sync_workers(1, kTranscodeThreads);
}

}  // namespace kvq::cuda
