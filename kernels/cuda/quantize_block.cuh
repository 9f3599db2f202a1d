// A dense block in shared memory -> a quantized block in device memory, codes straight from fragment registers.
//
// Invariant: warps 0 .. 3 write keys (and kept channels), warps 4 .. 7 values, in equal shares for every head size; every byte of the block
// is written once. A tile is 16 channels x 64 tokens of K or 16 tokens x all channels of V: whole groups, so a warp
// needs no other. `d` is a constant where the caller's is.
#pragma once

#include "kernels/cuda/matrices.cuh"
#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/page_codec.cuh"

namespace kvq::cuda {

// The key channels that stay in 16 bits, in the registers of each warp that writes keys: lane i has number i of the
// list, ascending, and word i of the mask.
struct KeptChannels {
  std::uint32_t number = kNoChannel, mask = 0;

  // All lanes.
  __device__ void add(std::uint32_t lane, std::uint32_t channel) {
    const std::uint32_t before = __shfl_up_sync(~0u, number, 1);
    if (number > channel) number = lane == 0 || before < channel ? channel : before;
    if (lane == channel / 32) mask |= 1u << channel % 32;
  }
  // Of key tile kt.
  __device__ std::uint32_t tile_mask(std::uint32_t kt) const { return __shfl_sync(~0u, mask, kt / 2) >> (16 * (kt % 2)); }
};

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
    const bool is_kept = kept != nullptr && (kept->tile_mask(kt) >> own_channel & 1) != 0;
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

inline constexpr std::uint32_t kKeyThreads = kTranscodeThreads / 2, kKeyBarrier = 1;

// Picks the channels of largest range, the lower one first among equals. The warps that write keys share `ranges`.
template <Dtype kType>
__device__ __forceinline__ KeptChannels choose_kept(const Lane& lane, std::uint32_t keys, std::uint32_t d,
                                                    std::uint32_t count, std::uint32_t* ranges) {
  for (std::uint32_t kt = lane.warp; kt < d / 16; kt += kKeyThreads / 32) {
    std::uint32_t r[4][4];
    load_key_tile(lane, keys, d, kt, r);
    float low, high;
    key_range<kType>(r).join(lane.g, low, high);
    if (lane.g >= 4) continue;
    const std::uint32_t channel = 16 * kt + 2 * lane.t + lane.g / 2 + 8 * (lane.g % 2);
    ranges[channel] = __float_as_uint(fabsf(__fsub_rn(high, low))) + 1;  // ordered like integers, and never 0
  }
  sync_workers(kKeyBarrier, kKeyThreads);
  std::uint32_t left[kMaxHeadDim / 32];  // of the channels lane, lane + 32, ...; 0: none, or taken
#pragma unroll
  for (std::uint32_t i = 0; i < kMaxHeadDim / 32; ++i) left[i] = 32 * i + lane.lane < d ? ranges[32 * i + lane.lane] : 0;
  sync_workers(kKeyBarrier, kKeyThreads);  // the next block's come after these
  KeptChannels kept;
  for (std::uint32_t n = 0; n < count; ++n) {
    std::uint32_t widest = left[0];
#pragma unroll
    for (std::uint32_t i = 1; i < kMaxHeadDim / 32; ++i) widest = max(widest, left[i]);
    widest = __reduce_max_sync(~0u, widest);
    std::uint32_t first = ~0u;
#pragma unroll
    for (std::uint32_t i = kMaxHeadDim / 32; i-- > 0;) first = left[i] == widest ? 32 * i + lane.lane : first;
    const std::uint32_t channel = __reduce_min_sync(~0u, first);
#pragma unroll
    for (std::uint32_t i = 0; i < kMaxHeadDim / 32; ++i) left[i] = channel == 32 * i + lane.lane ? 0 : left[i];
    kept.add(lane.lane, channel);
  }
  return kept;
}

// The list of kept channels and their elements as they are, by the warps that write keys.
__device__ inline void store_kept(const BlockWork& block, const Lane& lane, const std::byte* keys, std::uint32_t d,
                                  std::uint32_t count, const BlockOffsets& at, const KeptChannels& kept, Sums& sums) {
  const auto* elements = reinterpret_cast<const std::uint16_t*>(keys);
  if (lane.warp == 0) {
    const std::uint32_t even = __shfl_sync(~0u, kept.number, 2 * lane.lane % 8);
    const std::uint32_t odd = __shfl_sync(~0u, kept.number, (2 * lane.lane + 1) % 8);
    static_assert(kChannelListBytes == 32 * 4);
    store_word(block, at.channels + 4 * lane.lane, lane.lane < 4 ? even | odd << 16 : 0, sums);
  }
  for (std::uint32_t n = lane.warp; n < count; n += kKeyThreads / 32) {
    const std::uint32_t channel = __shfl_sync(~0u, kept.number, n), token = 2 * lane.lane;
    static_assert(kPageTokens == 64);
    const std::uint32_t low = elements[dense_index(token, channel, d)],
                        high = elements[dense_index(token + 1, channel, d)];
    store_word(block, at.kept + 2 * kPageTokens * n + 4 * lane.lane, low | high << 16, sums);
  }
}

// All working threads. `format` and `d` are those of the destination; `ranges` has room for a word a channel.
template <Dtype kType, bool kWide>
__device__ __forceinline__ void quantize_block(const BlockWork& block, const std::byte* dense, Format format,
                                               std::uint32_t d, const Lane& lane, std::uint32_t* ranges, Sums& sums) {
  const BlockOffsets at = block_offsets(format, d);
  const std::uint32_t keys = shared_address(dense), values = keys + kPageTokens * d * 2, count = kept_channels(format);
  if (lane.warp < kKeyThreads / 32) {
    KeptChannels kept;
    if (!kWide && count != 0) {
      kept = choose_kept<kType>(lane, keys, d, count, ranges);
      store_kept(block, lane, dense, d, count, at, kept, sums);
    }
    quantize_keys<kType, kWide>(block, lane, keys, d, at, count != 0 ? &kept : nullptr, sums);
  } else {
    quantize_values<kType>(block, lane, values, d, at, sums);
  }
  const std::uint32_t used = at.v_mid + 2 * kPageTokens,
                      padding = static_cast<std::uint32_t>(round_up(used, 128)) - used;
  if (threadIdx.x < padding / 16) __stcs(reinterpret_cast<uint4*>(block.to + used) + threadIdx.x, uint4{0, 0, 0, 0});
}

}  // namespace kvq::cuda
