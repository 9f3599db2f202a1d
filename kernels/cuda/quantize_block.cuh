// A dense block in shared memory -> a quantized block in device memory, codes straight from fragment registers.
//
// Invariant: warps 0 .. 3 write keys, warps 4 .. 7 values, in equal shares for every head size; every byte of the block
// is written once. A tile is 16 channels x 64 tokens of K or 16 tokens x all channels of V: whole groups, so a warp
// needs no other. `d` is a constant where the caller's is.
#pragma once

#include "kernels/cuda/block_copy.cuh"
#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/page_codec.cuh"

namespace kvq::cuda {

struct KeptChannels {
  alignas(16) std::uint32_t range[kMaxHeadDim];  // bits of max - min
  std::uint32_t mask[kMaxHeadDim / 32];          // of kept channels
  std::uint32_t list[8];                         // the same, ascending; kNoChannel: unused
};

__device__ inline void load_matrices(std::uint32_t address, std::uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void load_matrices_transposed(std::uint32_t address, std::uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// K tile kt: r[mt][j] holds channels 16 kt + 2 t + 8 (j >> 1) + (0, 1) of token 16 mt + g + 8 (j & 1).
__device__ __forceinline__ void load_key_tile(const Lane& lane, std::uint32_t keys, std::uint32_t d, std::uint32_t kt,
                                              std::uint32_t (&r)[4][4]) {
  const std::uint32_t chunk = dense_chunk(lane.row, 2 * kt + lane.matrix / 2, d);
#pragma unroll
  for (std::uint32_t mt = 0; mt < 4; ++mt) {
    load_matrices(keys + (16 * mt + lane.row + 8 * (lane.matrix % 2)) * 2 * d + chunk * 16, r[mt]);
  }
}

// V tile (kt, ct): r[j] holds tokens 16 kt + 2 t + 8 (j >> 1) + (0, 1) of channel 16 ct + g + 8 (j & 1).
__device__ __forceinline__ void load_value_tile(const Lane& lane, std::uint32_t values, std::uint32_t d,
                                                std::uint32_t kt, std::uint32_t ct, std::uint32_t (&r)[4]) {
  const std::uint32_t chunk = dense_chunk(lane.row, 2 * ct + lane.matrix % 2, d);
  load_matrices_transposed(values + (16 * kt + lane.row + 8 * (lane.matrix / 2)) * 2 * d + chunk * 16, r);
}

// The 16 words of a tile's parameters, one by each of the first 16 lanes, at scale_index() and mid_index() of their
// first item.
__device__ __forceinline__ void store_parameters(const BlockWork& block, const Lane& lane, std::uint32_t scale_at,
                                                 std::uint32_t mid_at, std::uint32_t count, std::uint32_t kt,
                                                 std::uint32_t word, Sums& sums) {
  if (lane.lane >= 16) return;
  const std::uint32_t h = lane.g % 2, odd = kt % 2, tiles = count / 16;
  const bool is_mid = lane.g >= 2, alone = tiles % 2 != 0 && kt + 1 == tiles;
  const std::uint32_t in_pair = alone ? 8 * lane.t + 4 * h : 16 * lane.t + (is_mid ? 8 * h + 4 * odd : 8 * odd + 4 * h);
  store_word(block, (is_mid ? mid_at : scale_at) + kt / 2 * 64 + in_pair, word, sums);
}

template <Dtype kType>
__device__ __forceinline__ Range<kType> key_range(const std::uint32_t (&r)[4][4]) {
  Range<kType> range(r[0]);
#pragma unroll
  for (int mt = 1; mt < 4; ++mt) range.include(r[mt]);
  return range;
}

// The group that is this lane's to compute.
template <Dtype kType>
__device__ __forceinline__ Group own_group(const Range<kType>& range, const Lane& lane, float top, bool kept,
                                           Sums& sums) {
  float low, high;
  range.join(lane.g, low, high);
  const Group group(low, high, Pair<kType>::kLargest, top, kept);
  sums.refused |= group.refused;
  return group;
}

template <Dtype kType, bool kPlain>
__device__ __forceinline__ uint4 key_codes(const Group& own, const Lane& lane, const std::uint32_t (&r)[4][4]) {
  const Groups<kPlain> groups(own, lane.t, kTop4);
  return {code_word<kType>(groups, r[0]), code_word<kType>(groups, r[1]), code_word<kType>(groups, r[2]),
          code_word<kType>(groups, r[3])};
}

template <Dtype kType, bool kWide>
__device__ __forceinline__ void quantize_keys(const BlockWork& block, const Lane& lane, std::uint32_t keys,
                                              std::uint32_t d, const BlockOffsets& at, const KeptChannels* kept,
                                              Sums& sums) {
  for (std::uint32_t kt = lane.warp; kt < d / 16; kt += 4) {
    std::uint32_t r[4][4];
    load_key_tile(lane, keys, d, kt, r);
    const std::uint32_t own_channel = 2 * lane.t + lane.g / 2 % 2 + 8 * (lane.g % 2);
    const bool is_kept = kept != nullptr && (kept->mask[kt / 2] >> (16 * (kt % 2) + own_channel) & 1) != 0;
    const Group own = own_group(key_range<kType>(r), lane, kWide ? kTop8 : kTop4, is_kept, sums);
    uint4 w;
    if constexpr (kWide) {
      const Groups<false> groups(own, lane.t, kTop8);
      uint4 low;
      code_words<kType>(groups, r[0], w.x, low.x);
      code_words<kType>(groups, r[1], w.y, low.y);
      code_words<kType>(groups, r[2], w.z, low.z);
      code_words<kType>(groups, r[3], w.w, low.w);
      store_chunk(block, at.k_low + kt * 512 + lane.lane * 16, low, sums);
    } else if (__all_sync(~0u, own.plain)) {
      w = key_codes<kType, true>(own, lane, r);
    } else {
      w = key_codes<kType, false>(own, lane, r);
    }
    store_chunk(block, at.k + kt * 512 + lane.lane * 16, w, sums);
    store_parameters(block, lane, at.k_scale, at.k_mid, d, kt, own.parameters(lane.g), sums);
  }
}

// The words of V tile kt; a last group of channel tiles that is not full has fewer words per lane.
template <Dtype kType, bool kPlain>
__device__ __forceinline__ void store_value_codes(const BlockWork& block, const Lane& lane, std::uint32_t values,
                                                  std::uint32_t d, std::uint32_t kt, std::uint32_t codes_at,
                                                  const Group& own, Sums& sums) {
  const Groups<kPlain> groups(own, lane.t, kTop4);
  const std::uint32_t tiles = d / 16;
  for (std::uint32_t first = 0; first < tiles; first += 4) {
    const std::uint32_t width = tiles - first < 4 ? tiles - first : 4;
    std::uint32_t w[4];
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      if (i >= width) break;
      std::uint32_t r[4];
      load_value_tile(lane, values, d, kt, first + i, r);
      w[i] = code_word<kType>(groups, r);
    }
    const std::uint32_t to = codes_at + (kt * tiles + first) * 128 + lane.lane * 4 * width;
    if (width == 4) {
      store_chunk(block, to, {w[0], w[1], w[2], w[3]}, sums);
    } else {
#pragma unroll
      for (std::uint32_t i = 0; i < 3; ++i) {
        if (i < width) store_word(block, to + 4 * i, w[i], sums);
      }
    }
  }
}

template <Dtype kType>
__device__ __forceinline__ void quantize_values(const BlockWork& block, const Lane& lane, std::uint32_t values,
                                                std::uint32_t d, const BlockOffsets& at, Sums& sums) {
  const std::uint32_t kt = lane.warp % 4;
  std::uint32_t r[4];
  load_value_tile(lane, values, d, kt, 0, r);
  Range<kType> range(r);
#pragma unroll 8
  for (std::uint32_t ct = 1; ct < d / 16; ++ct) {
    load_value_tile(lane, values, d, kt, ct, r);
    range.include(r);
  }
  const Group own = own_group(range, lane, kTop4, false, sums);
  if (__all_sync(~0u, own.plain)) {
    store_value_codes<kType, true>(block, lane, values, d, kt, at.v, own, sums);
  } else {
    store_value_codes<kType, false>(block, lane, values, d, kt, at.v, own, sums);
  }
  store_parameters(block, lane, at.v_scale, at.v_mid, kPageTokens, kt, own.parameters(lane.g), sums);
}

// Picks the channels of largest range, the lower one first among equals. All threads; three rounds of __syncthreads().
template <Dtype kType>
__device__ inline void choose_kept(const Lane& lane, std::uint32_t keys, std::uint32_t d, std::uint32_t count,
                                   KeptChannels& kept) {
  for (std::uint32_t kt = lane.warp; kt < d / 16; kt += kTranscodeWarps) {
    std::uint32_t r[4][4];
    load_key_tile(lane, keys, d, kt, r);
    float low, high;
    key_range<kType>(r).join(lane.g, low, high);
    if (lane.g >= 4) continue;
    const std::uint32_t channel = 16 * kt + 2 * lane.t + lane.g / 2 + 8 * (lane.g % 2);
    kept.range[channel] = __float_as_uint(fabsf(__fsub_rn(high, low)));  // not negative, so ordered like integers
  }
  __syncthreads();
  const std::uint32_t channel = threadIdx.x;
  static_assert(kTranscodeThreads >= kMaxHeadDim);
  std::uint32_t wider = 0;
  if (channel < d) {
    const std::uint32_t own = kept.range[channel];
    const auto ahead = [&](std::uint32_t other, std::uint32_t c) {
      return other + (c < channel ? 1 : 0) > own ? 1u : 0u;
    };
    for (std::uint32_t c = 0; c < d; c += 4) {
      const uint4 other = *reinterpret_cast<const uint4*>(kept.range + c);
      wider += ahead(other.x, c) + ahead(other.y, c + 1) + ahead(other.z, c + 2) + ahead(other.w, c + 3);
    }
  }
  const std::uint32_t mask = __ballot_sync(~0u, channel < d && wider < count);
  if (lane.lane == 0) kept.mask[lane.warp] = mask;
  if (threadIdx.x < 8) kept.list[threadIdx.x] = kNoChannel;
  __syncthreads();
  if (mask >> lane.lane & 1) {
    std::uint32_t place = __popc(mask & ((1u << lane.lane) - 1));
    for (std::uint32_t i = 0; i < lane.warp; ++i) place += __popc(kept.mask[i]);
    if (place < 8) kept.list[place] = channel;  // NaN makes more, in a block that is refused
  }
  __syncthreads();
}

// The list of kept channels and their elements as they are. All threads, after choose_kept().
__device__ inline void store_kept(const BlockWork& block, const std::uint16_t* keys, std::uint32_t d,
                                  std::uint32_t count, const BlockOffsets& at, const KeptChannels& kept, Sums& sums) {
  if (threadIdx.x < kChannelListBytes / 4) {
    const std::uint32_t n = 2 * threadIdx.x, pair = n < 8 ? kept.list[n] | kept.list[n + 1] << 16 : 0;
    store_word(block, at.channels + 4 * threadIdx.x, pair, sums);
  }
  for (std::uint32_t i = threadIdx.x; i < count * kPageTokens / 2; i += kTranscodeThreads) {
    const std::uint32_t channel = kept.list[i / (kPageTokens / 2)], token = i % (kPageTokens / 2) * 2;
    if (channel >= d) continue;
    const std::uint32_t low = keys[dense_index(token, channel, d)], high = keys[dense_index(token + 1, channel, d)];
    store_word(block, at.kept + 4 * i, low | high << 16, sums);
  }
}

// All threads. `format` and `d` are those of the destination.
template <Dtype kType, bool kWide>
__device__ __forceinline__ void quantize_block(const BlockWork& block, const std::byte* dense, Format format,
                                               std::uint32_t d, const Lane& lane, KeptChannels* kept, Sums& sums) {
  const BlockOffsets at = block_offsets(format, d);
  const std::uint32_t keys = shared_address(dense), values = keys + kPageTokens * d * 2;
  if (kept != nullptr) {
    choose_kept<kType>(lane, keys, d, kept_channels(format), *kept);
    store_kept(block, reinterpret_cast<const std::uint16_t*>(dense), d, kept_channels(format), at, *kept, sums);
  }
  if (lane.warp < 4) {
    quantize_keys<kType, kWide>(block, lane, keys, d, at, kept, sums);
  } else {
    quantize_values<kType>(block, lane, values, d, at, sums);
  }
  const std::uint32_t used = at.v_mid + 2 * kPageTokens,
                      padding = static_cast<std::uint32_t>(round_up(used, 128)) - used;
  if (threadIdx.x < padding / 16) *reinterpret_cast<uint4*>(block.to + used + threadIdx.x * 16) = uint4{0, 0, 0, 0};
}

}  // namespace kvq::cuda
