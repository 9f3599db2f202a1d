// A quantized block in shared memory -> a dense block in shared memory.
//
// Invariant: every element of the block is written, once but for kept channels, which are written over what their zero
// scale and midpoint gave; a channel list that damage has changed leads nowhere outside the block.
#pragma once

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

  // The two elements (e = 0, 1) of register j; codes in the low nibble or byte of each half.
  template <Dtype kType>
  __device__ std::uint32_t pair(std::uint32_t codes, std::uint32_t j, float center) const {
    const std::uint32_t h = j / 2;
    return Pair<kType>::round(decode(codes & 0xffff, center, h == 0 ? scale[0] : scale[2], h == 0 ? mid[0] : mid[2]),
                              decode(codes >> 16, center, h == 0 ? scale[1] : scale[3], h == 0 ? mid[1] : mid[3]));
  }
};

template <Dtype kType>
__device__ inline void dequantize_keys(const std::byte* block, const Lane& lane, std::uint32_t d,
                                       const BlockOffsets& at, bool wide, std::byte* dense) {
  auto* out = reinterpret_cast<std::uint32_t*>(dense);
  for (std::uint32_t kt = lane.warp; kt < d / 16; kt += kTranscodeWarps) {
    const std::uint32_t channel = 16 * kt + 2 * lane.t;
    const GroupValues groups(block, at.k_scale, at.k_mid, channel, d);
    const uint4 codes = chunk_at(block, at.k + kt * 512 + lane.lane * 16);
    const uint4 low_codes = wide ? chunk_at(block, at.k_low + kt * 512 + lane.lane * 16) : uint4{0, 0, 0, 0};
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    const std::uint32_t low_words[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
#pragma unroll
    for (std::uint32_t mt = 0; mt < 4; ++mt) {
#pragma unroll
      for (std::uint32_t j = 0; j < 4; ++j) {
        std::uint32_t pair = (words[mt] >> (4 * j)) & 0x000f'000fu;
        if (wide) pair = pair << 4 | ((low_words[mt] >> (4 * j)) & 0x000f'000fu);
        const std::uint32_t token = 16 * mt + lane.g + 8 * (j % 2);
        out[dense_index(token, channel + 8 * (j / 2), d) / 2] =
            groups.pair<kType>(pair, j, wide ? 0.5f * kTop8 : 0.5f * kTop4);
      }
    }
  }
}

template <Dtype kType>
__device__ inline void dequantize_values(const std::byte* block, const Lane& lane, std::uint32_t d,
                                         const BlockOffsets& at, std::uint16_t* out) {
  const std::uint32_t kt = lane.warp % 4, token = 16 * kt + 2 * lane.t;
  const GroupValues groups(block, at.v_scale, at.v_mid, token, kPageTokens);
  const auto* words = reinterpret_cast<const std::uint32_t*>(block + at.v);
  for (std::uint32_t ct = lane.warp / 4; ct < d / 16; ct += kTranscodeWarps / 4) {
    const std::uint32_t channel = 16 * ct + lane.g, word = words[v_code_at(token, channel, d).word];
#pragma unroll
    for (std::uint32_t j = 0; j < 4; ++j) {
      const std::uint32_t pair = groups.pair<kType>((word >> (4 * j)) & 0x000f'000fu, j, 0.5f * kTop4);
      const std::uint32_t first = token + 8 * (j / 2), c = channel + 8 * (j % 2);
      out[dense_index(first, c, d)] = static_cast<std::uint16_t>(pair);
      out[dense_index(first + 1, c, d)] = static_cast<std::uint16_t>(pair >> 16);
    }
  }
}

// All threads; the block is complete after the __syncthreads() at the end.
template <Dtype kType>
__device__ inline void dequantize_block(const std::byte* block, Format format, std::uint32_t d, const Lane& lane,
                                        std::byte* dense) {
  const BlockOffsets at = block_offsets(format, d);
  auto* out = reinterpret_cast<std::uint16_t*>(dense);
  dequantize_keys<kType>(block, lane, d, at, format == Format::k8v4, dense);
  dequantize_values<kType>(block, lane, d, at, out + kPageTokens * d);
  __syncthreads();
  if (const std::uint32_t kept = kept_channels(format); kept != 0) {
    const auto* list = reinterpret_cast<const std::uint16_t*>(block + at.channels);
    const auto* values = reinterpret_cast<const std::uint16_t*>(block + at.kept);
    for (std::uint32_t i = threadIdx.x; i < kept * kPageTokens; i += kTranscodeThreads) {
      const std::uint32_t channel = list[i / kPageTokens];
      if (channel < d) out[dense_index(i % kPageTokens, channel, d)] = values[i];
    }
    __syncthreads();
  }
}

}  // namespace kvq::cuda
