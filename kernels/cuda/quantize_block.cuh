// A dense block in shared memory -> a quantized block in device memory, codes straight from fragment registers.
//
// Invariant: warps 0 .. 3 write keys (and kept channels), warps 4 .. 7 values, in equal shares for every head size;
// every byte of the block is written once. A tile is 16 channels x 64 tokens of K or 16 tokens x all channels of V:
// whole groups, so a warp needs no other. `d` is a constant where the caller's is.
#pragma once

#include "kernels/cuda/matrices.cuh"
#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/page_codec.cuh"

namespace kvq::cuda {

inline constexpr std::uint32_t kKeyWarps = kTranscodeWarps / 2, kKeyBarrier = 1;

// What the warps that write keys know of channels, in shared memory.
struct KeyScratch {
  float2 ends[kMaxHeadDim];          // smallest and largest element
  std::uint16_t kept[kKeyWarps][8];  // those that stay in 16 bits, ascending; each warp has a list of its own
};
static_assert(sizeof(KeyScratch) == kKeyScratchBytes);

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

// What a warp keeps of the choice: lane i has the bits of channels i, i + 32, ...
struct KeptChannels {
  const float2* ends;
  std::uint32_t chosen;

  // All lanes.
  __device__ bool has(std::uint32_t channel) const {
    return (__shfl_sync(~0u, chosen, channel % 32) >> channel / 32 & 1) != 0;
  }
};

// Ordered like integers.
__device__ inline std::uint32_t range_bits(float2 ends) { return __float_as_uint(fabsf(__fsub_rn(ends.y, ends.x))); }

// This lane's channels among the `count` of largest range, the lower one first among equals: by their ranks, slowly.
__device__ inline std::uint32_t chosen_by_rank(const float2* ends, std::uint32_t d, std::uint32_t count) {
  std::uint32_t chosen = 0;
#pragma unroll 1
  for (std::uint32_t channel = threadIdx.x % 32; channel < d; channel += 32) {
    const std::uint32_t own = range_bits(ends[channel]);
    std::uint32_t rank = 0;
#pragma unroll 1
    for (std::uint32_t c = 0; c < d; ++c) rank += range_bits(ends[c]) + (c < channel ? 1 : 0) > own ? 1 : 0;
    if (rank < count) chosen |= 1u << channel / 32;
  }
  return chosen;
}

// The same, from one word a channel: its range but for the last seven bits, and its number turned round. Should these
// bits matter, that is, if the last that was chosen and the next differ in nothing else, ranks decide.
__device__ __forceinline__ std::uint32_t choose(const float2* ends, std::uint32_t d, std::uint32_t count) {
  constexpr std::uint32_t kMost = kMaxHeadDim / 32, kNumber = 0xff;
  static_assert(kMaxHeadDim == kNumber + 1);
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t key[kMost], chosen = 0, last = 0, widest = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kMost && 32 * i < d; ++i) {
    const std::uint32_t channel = 32 * i + lane;
    key[i] = channel < d ? (range_bits(ends[channel]) << 1 & ~kNumber) | (kNumber - channel) : 0;
  }
  for (std::uint32_t n = 0;; ++n) {
    std::uint32_t own = key[0];
#pragma unroll
    for (std::uint32_t i = 1; i < kMost && 32 * i < d; ++i) own = max(own, key[i]);
    last = widest;
    widest = __reduce_max_sync(~0u, own);
    if (n == count) break;
#pragma unroll
    for (std::uint32_t i = 0; i < kMost && 32 * i < d; ++i) key[i] = key[i] == widest ? 0 : key[i];
    const std::uint32_t channel = kNumber - (widest & kNumber);
    if (lane == channel % 32) chosen |= 1u << channel / 32;
  }
  if ((widest | kNumber) != (last | kNumber)) return chosen;
  bool matters = false;
#pragma unroll 1
  for (std::uint32_t channel = lane; channel < d; channel += 32) {
    const std::uint32_t bits = range_bits(ends[channel]);
    matters |= (bits << 1 | kNumber) == (last | kNumber) && (bits & kNumber / 2) != 0;
  }
  return __any_sync(~0u, matters) ? chosen_by_rank(ends, d, count) : chosen;
}

// Picks the kept channels: every warp that writes keys by itself, from ranges that they find together.
template <Dtype kType>
__device__ __forceinline__ KeptChannels choose_kept(const Lane& lane, std::uint32_t keys, std::uint32_t d,
                                                    std::uint32_t count, KeyScratch& scratch) {
  sync_workers(kKeyBarrier, 32 * kKeyWarps);  // the block before this is out of the scratch
#pragma unroll
  for (std::uint32_t n = 0; n < kMaxHeadDim / 16 / kKeyWarps; ++n) {
    const std::uint32_t kt = n * kKeyWarps + lane.warp;
    if (kt >= d / 16) break;
    std::uint32_t r[4][4];
    load_key_tile(lane, keys, d, kt, r);
    float2 ends;
    key_range<kType>(r).join(lane.g, ends.x, ends.y);
    if (lane.g < 4) scratch.ends[16 * kt + lane.own] = ends;
  }
  sync_workers(kKeyBarrier, 32 * kKeyWarps);
  const KeptChannels kept{scratch.ends, choose(scratch.ends, d, count)};
  std::uint32_t place = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kMaxHeadDim / 32 && 32 * i < d; ++i) {
    const std::uint32_t lanes = __ballot_sync(~0u, kept.chosen >> i & 1);
    if ((lanes >> lane.lane & 1) != 0) {
      scratch.kept[lane.warp][place + __popc(lanes & ((1u << lane.lane) - 1))] =
          static_cast<std::uint16_t>(32 * i + lane.lane);
    }
    place += __popc(lanes);
  }
  if (lane.lane >= count && lane.lane < 8) scratch.kept[lane.warp][lane.lane] = kNoChannel;
  __syncwarp();
  return kept;
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
  // Who gets one tile more, where they are not a multiple of four, changes from block to block.
  for (std::uint32_t kt = (lane.warp + block.number) % 4; kt < d / 16; kt += 4) {
    std::uint32_t r[4][4];
    load_key_tile(lane, keys, d, kt, r);
    float2 ends;
    bool is_kept = false;
    if (kept != nullptr) {
      ends = kept->ends[16 * kt + lane.own];
      is_kept = kept->has(16 * kt + lane.own);
    } else {
      key_range<kType>(r).join(lane.g, ends.x, ends.y);
    }
    const Group own(ends.x, ends.y, Pair<kType>::kLargest, kWide ? kTop8 : kTop4, is_kept);
    sums.refused |= own.refused;
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
  float low, high;
  range.join(lane.g, low, high);
  const Group own(low, high, Pair<kType>::kLargest, kTop4, false);
  sums.refused |= own.refused;
  if (__all_sync(~0u, own.plain)) {
    store_value_codes<kType, true>(block, lane, values, d, kt, at.v, own, sums);
  } else {
    store_value_codes<kType, false>(block, lane, values, d, kt, at.v, own, sums);
  }
  store_parameters(block, lane, at.v_scale, at.v_mid, kPageTokens, kt, own.parameters(lane.g), sums);
}

// The list of kept channels and their elements as they are, by the warps that write keys.
__device__ __forceinline__ void store_kept(const BlockWork& block, const Lane& lane, const std::byte* keys,
                                           std::uint32_t d, std::uint32_t count, const BlockOffsets& at,
                                           const KeyScratch& scratch, Sums& sums) {
  const auto* elements = reinterpret_cast<const std::uint16_t*>(keys);
  const std::uint16_t* list = scratch.kept[lane.warp];
  if (lane.warp == 0) {
    static_assert(kChannelListBytes == 32 * 4);
    const std::uint32_t pair = lane.lane < 4 ? reinterpret_cast<const std::uint32_t*>(list)[lane.lane] : 0;
    store_word(block, at.channels + 4 * lane.lane, pair, sums);
  }
  for (std::uint32_t n = lane.warp; n < count; n += kKeyWarps) {
    const std::uint32_t channel = list[n], token = 2 * lane.lane;
    static_assert(kPageTokens == 64);
    const std::uint32_t low = elements[dense_index(token, channel, d)],
                        high = elements[dense_index(token + 1, channel, d)];
    store_word(block, at.kept + 2 * kPageTokens * n + 4 * lane.lane, low | high << 16, sums);
  }
}

// All working threads. `format` and `d` are those of the destination.
template <Dtype kType, bool kWide>
__device__ __forceinline__ void quantize_block(const BlockWork& block, const std::byte* dense, Format format,
                                               std::uint32_t d, const Lane& lane, KeyScratch& scratch, Sums& sums) {
  const BlockOffsets at = block_offsets(format, d);
  const std::uint32_t keys = shared_address(dense), values = keys + kPageTokens * d * 2, count = kept_channels(format);
  if (lane.warp >= kKeyWarps) {
    quantize_values<kType>(block, lane, values, d, at, sums);
  } else if (kWide || count == 0) {
    quantize_keys<kType, kWide>(block, lane, keys, d, at, nullptr, sums);
  } else {
    const KeptChannels kept = choose_kept<kType>(lane, keys, d, count, scratch);
    store_kept(block, lane, dense, d, count, at, scratch, sums);
    quantize_keys<kType, false>(block, lane, keys, d, at, &kept, sums);
  }
  const std::uint32_t used = at.v_mid + 2 * kPageTokens,
                      padding = static_cast<std::uint32_t>(round_up(used, 128)) - used;
  if (threadIdx.x < padding / 16) __stcs(reinterpret_cast<uint4*>(block.to + used) + threadIdx.x, uint4{0, 0, 0, 0});
}

}  // namespace kvq::cuda
