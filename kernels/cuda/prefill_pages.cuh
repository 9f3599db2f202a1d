// From a page as it is stored to keys and values in 16 bits as the tensor cores read them: the work of the producers.
//
// Invariant: a quantized element becomes mid + (code - c) scale, code - c exactly: rounded once in fp16, and in bf16
// with scale and midpoint rounded before. Fragment order is that of the matrices that stmatrix writes, so every word of
// codes is read once and stored once, without bank conflicts; dense rows keep their order of chunks. Values of tokens
// that no row of the tile sees are zeros, so what an open page holds behind its end never meets a weight of zero.
#pragma once

#include "kernels/cuda/prefill_stream.cuh"

namespace kvq::cuda {

// Pairs of elements. Nibble j of both halves of a word -> code - 7.5, through a magic number whose unit is the
// nibble's.
template <Dtype kType>
struct CodePair;

template <>
struct CodePair<Dtype::fp16> {
  template <std::uint32_t kNibble>
  __device__ __forceinline__ static std::uint32_t centred(std::uint32_t w) {
    if constexpr (kNibble == 0)
      return subtract(with_magic<0x001e001eu, 0x60006000u>(w << 1), 0x600f600fu);  // 512 + code
    const std::uint32_t at = kNibble <= 1 ? w : w >> (4 * kNibble - 4) % 32;
    return subtract(with_magic<0x00f000f0u, 0x54005400u>(at), 0x54785478u);  // 64 + code
  }
  __device__ __forceinline__ static std::uint32_t subtract(std::uint32_t a, std::uint32_t b) {
    return subtract_pairs(a, b);
  }
  static constexpr std::uint32_t kSixteen = 0x4c004c00u;
  __device__ __forceinline__ static std::uint32_t parameter(std::uint32_t pair) { return pair; }
};

template <>
struct CodePair<Dtype::bf16> {
  template <std::uint32_t kNibble>
  __device__ __forceinline__ static std::uint32_t centred(std::uint32_t w) {
    if constexpr (kNibble == 0)
      return subtract(with_magic<0x001e001eu, 0x42804280u>(w << 1), 0x428f428fu);                     // 64 + code
    return subtract(with_magic<0x00780078u, 0x41804180u>(w >> (4 * kNibble - 3) % 32), 0x41bc41bcu);  // 16 + code
  }
  __device__ __forceinline__ static std::uint32_t subtract(std::uint32_t a, std::uint32_t b) {
    return fma_pairs<Dtype::bf16>(b, 0xbf80bf80u, a);
  }
  static constexpr std::uint32_t kSixteen = 0x41804180u;
  __device__ __forceinline__ static std::uint32_t parameter(std::uint32_t pair) {
    const float2 v = unpack_pair<Dtype::fp16>(pair);
    return pack_pair<Dtype::bf16>(v.x, v.y);
  }
};

// Scales and midpoints of 16 channels or tokens, for the pairs h = 0, 1 of this lane.
template <Dtype kType>
struct TileParameters {
  std::uint32_t scale[2], mid[2];
  bool near_end;  // of fp16's range: rounding may leave it

  __device__ __forceinline__ TileParameters(std::uint32_t scales, std::uint32_t mids, std::uint32_t tile,
                                            std::uint32_t lane) {
    const std::uint32_t at = tile / 2 * 64 + lane % 4 * 16;
    const uint2 s = load_shared2(scales + at + tile % 2 * 8);
    const std::uint32_t m[2] = {load_shared1(mids + at + tile % 2 * 4), load_shared1(mids + at + 8 + tile % 2 * 4)};
    near_end = false;
    if constexpr (kType == Dtype::fp16) {
      near_end = reaches_end(s.x, m[0]) || reaches_end(s.y, m[1]);
    }
    scale[0] = CodePair<kType>::parameter(s.x), scale[1] = CodePair<kType>::parameter(s.y);
    mid[0] = CodePair<kType>::parameter(m[0]), mid[1] = CodePair<kType>::parameter(m[1]);
  }

  // Of pairs in fp16: whether |mid| + 127.5 scale may be infinite after rounding.
  __device__ __forceinline__ static bool reaches_end(std::uint32_t scales, std::uint32_t mids) {
    return any_reaches(scales, 0x57f857f8u, mids & 0x7fff7fffu, 0x7bf07bf0u);
  }

  template <std::uint32_t kNibble>
  __device__ __forceinline__ std::uint32_t element_pair(std::uint32_t word) const {
    return fma_pairs<kType>(CodePair<kType>::template centred<kNibble>(word), scale[kNibble / 2], mid[kNibble / 2]);
  }
  // 8-bit codes: 16 high + low - 127.5 = 16 (high - 7.5) + (low - 7.5).
  template <std::uint32_t kNibble>
  __device__ __forceinline__ std::uint32_t element_pair(std::uint32_t high, std::uint32_t low) const {
    const std::uint32_t code =
        fma_pairs<kType>(CodePair<kType>::template centred<kNibble>(high), CodePair<kType>::kSixteen,
                         CodePair<kType>::template centred<kNibble>(low));
    return fma_pairs<kType>(code, scale[kNibble / 2], mid[kNibble / 2]);
  }
};

__device__ __forceinline__ void clamp_pairs(Fragment& f) {
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) f.r[i] = clamp_pair(f.r[i]);
}

// The keys of one tile of 16 channels, 64 tokens.
template <Dtype kType, bool kWide, bool kClamp>
__device__ __forceinline__ void decode_key_tile(const TileParameters<kType>& with, std::uint32_t codes,
                                                std::uint32_t low_codes, std::uint32_t to) {
  const uint4 w = load_shared4(codes), l = kWide ? load_shared4(low_codes) : uint4{};
  const std::uint32_t words[4] = {w.x, w.y, w.z, w.w}, lows[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
  for (std::uint32_t m = 0; m < 4; ++m) {
    Fragment f;
    if constexpr (kWide) {
      f = {{with.template element_pair<0>(words[m], lows[m]), with.template element_pair<1>(words[m], lows[m]),
            with.template element_pair<2>(words[m], lows[m]), with.template element_pair<3>(words[m], lows[m])}};
    } else {
      f = {{with.template element_pair<0>(words[m]), with.template element_pair<1>(words[m]),
            with.template element_pair<2>(words[m]), with.template element_pair<3>(words[m])}};
    }
    if (kClamp) clamp_pairs(f);
    store_matrices<false>(to + m * 2048, f);
  }
}

template <Dtype kType, bool kWide>
__device__ __forceinline__ void decode_key_tile(std::uint32_t scales, std::uint32_t mids, std::uint32_t codes,
                                                std::uint32_t low_codes, std::uint32_t tile, std::uint32_t to,
                                                std::uint32_t lane) {
  const TileParameters<kType> with(scales, mids, tile, lane);
  if (kType == Dtype::fp16 && __any_sync(kAllLanes, with.near_end)) {
    decode_key_tile<kType, kWide, true>(with, codes, low_codes, to);
  } else {
    decode_key_tile<kType, kWide, false>(with, codes, low_codes, to);
  }
}

// Four value tiles of 16 channels, 16 tokens.
template <Dtype kType, bool kClamp>
__device__ __forceinline__ void decode_value_tiles(const TileParameters<kType>& with, std::uint32_t codes,
                                                   std::uint32_t to) {
  const uint4 w = load_shared4(codes);
  const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (std::uint32_t c = 0; c < 4; ++c) {
    Fragment f = {{with.template element_pair<0>(words[c]), with.template element_pair<1>(words[c]),
                   with.template element_pair<2>(words[c]), with.template element_pair<3>(words[c])}};
    if (kClamp) clamp_pairs(f);
    store_matrices<true>(to ^ c * 32, f);
  }
}

// A warp's part of a page: `warp` of the four that share the keys, or of the four that share the values.
template <std::uint32_t kD, Dtype kType>
struct PageDecoder {
  static constexpr std::uint32_t kEach = kD / 64;  // key tiles of a warp, groups of four value tiles
  std::uint32_t warp, lane;
  std::uint32_t codes_at;          // of this warp's first tile, from where its codes begin
  std::uint32_t key_to, value_to;  // where this lane points stmatrix at in a stage; chunks are XORed to it

  // Keys, matrix j: tokens 16 m + 8 (j & 1), chunk 2 tile + (j >> 1). Values, transposed: tokens 16 warp + 8 (j >> 1),
  // chunk 2 c + (j & 1).
  __device__ __forceinline__ PageDecoder(std::uint32_t warp, std::uint32_t lane)
      : warp(warp),
        lane(lane),
        codes_at(warp * kEach * 512 + lane * 16),
        key_to((lane % 8 + lane / 8 % 2 * 8) * 128 + (lane / 16 ^ lane % 8) * 16),
        value_to((16 * warp + lane % 8 + lane / 16 * 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16) {}

  __device__ __forceinline__ void keys(Kind kind, std::uint32_t block, std::uint32_t stage) const {
    if (kind == Kind::k8v4) {
      constexpr BlockOffsets at = block_offsets(Format::k8v4, kD);
#pragma unroll
      for (std::uint32_t i = 0; i < kEach; ++i) {
        const std::uint32_t codes = block + codes_at + i * 512;
        decode_key_tile<kType, true>(block + at.k_scale, block + at.k_mid, codes, codes + at.k_low, warp * kEach + i,
                                     key_stage(stage, i), lane);
      }
      return;
    }
    constexpr BlockOffsets at = block_offsets(Format::int4, kD);
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
      decode_key_tile<kType, false>(block + at.k_scale, block + at.k_mid, block + codes_at + i * 512, 0,
                                    warp * kEach + i, key_stage(stage, i), lane);
    }
    if (kind != Kind::int4) kept_keys(block, kind == Kind::int4_k4 ? 4 : 8, stage);
  }

  __device__ __forceinline__ void values(Kind kind, std::uint32_t block, std::uint32_t stage) const {
    constexpr BlockOffsets at = block_offsets(Format::int4, kD);
    const std::uint32_t part = block + (kind == Kind::k8v4 ? block_offsets(Format::k8v4, kD).v : at.v);
    const TileParameters<kType> with(part + at.v_scale - at.v, part + at.v_mid - at.v, warp, lane);
    const bool clamps = kType == Dtype::fp16 && __any_sync(kAllLanes, with.near_end);
#pragma unroll
    for (std::uint32_t group = 0; group < kEach; ++group) {
      const std::uint32_t to = stage + value_to + group * (kPageTokens * 128);
      if (clamps) {
        decode_value_tiles<kType, true>(with, part + codes_at + group * 512, to);
      } else {
        decode_value_tiles<kType, false>(with, part + codes_at + group * 512, to);
      }
    }
  }

 private:
  __device__ __forceinline__ std::uint32_t key_stage(std::uint32_t stage, std::uint32_t i) const {
    const std::uint32_t tile = warp * kEach + i;
    return (stage + key_to + tile / 4 * (kPageTokens * 128)) ^ tile % 4 * 32;
  }

  // Channels that int4_kN keeps, over what their zero scale and midpoint gave: those of this warp's tiles.
  __device__ __forceinline__ void kept_keys(std::uint32_t block, std::uint32_t count, std::uint32_t stage) const {
    constexpr std::uint32_t kList = block_offsets(Format::int4_k4, kD).channels, kKept = kList + kChannelListBytes;
    __syncwarp();
#pragma unroll 1
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t channel = load_shared_half(block + kList + 2 * i);
      if (channel >= kD || channel / (16 * kEach) != warp) continue;  // unused, or another warp's
      const std::uint32_t pair = load_shared1(block + kKept + 2 * (i * kPageTokens + 2 * lane));
#pragma unroll
      for (std::uint32_t e = 0; e < 2; ++e) {
        const std::uint32_t token = 2 * lane + e, chunk = channel / 8 % 8;
        const std::uint32_t at =
            stage + channel / 64 * (kPageTokens * 128) + token * 128 + ((chunk ^ (token & 7)) * 16) + channel % 8 * 2;
        store_shared_half(at, static_cast<std::uint16_t>(e == 0 ? pair : pair >> 16));
      }
    }
  }
};

// Asks for keys or values of a dense page, by 128 threads; tokens outside [begin, end) become zeros.
template <std::uint32_t kD>
__device__ __forceinline__ void copy_rows(std::uint64_t from, std::uint32_t stage, std::uint32_t begin,
                                          std::uint32_t end, std::uint32_t thread) {
#pragma unroll
  for (std::uint32_t i = thread; i < kPageTokens * kD / 8; i += kGroupThreads) {
    const std::uint32_t token = i / (kD / 8), chunk = i % (kD / 8);
    const std::uint32_t to = stage + chunk / 8 * (kPageTokens * 128) + token * 128 + chunk % 8 * 16;
    const std::uint32_t bytes = token >= begin && token < end ? 16 : 0;
    copy16_or_zero(to, from + i * 16, bytes);
  }
}

// Zeros, or NaN, by 128 threads.
template <std::uint32_t kD>
__device__ __forceinline__ void fill_rows_with(std::uint32_t pair, std::uint32_t stage, std::uint32_t thread) {
#pragma unroll
  for (std::uint32_t i = thread; i < kPageTokens * kD / 8; i += kGroupThreads) {
    store_shared4(stage + i * 16, {pair, pair, pair, pair});
  }
}

}  // namespace kvq::cuda
