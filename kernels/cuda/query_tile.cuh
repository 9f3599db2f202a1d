// The queries of a tile as B fragments of up to three 16-bit planes, in shared memory and registers.
//
// Invariant: a row is divided by a power of two that brings its largest element into [2, 4), so that q * scale of any
// page stays within fp16 (a 4-bit scale is at most 8,734), and its `factor` multiplies it back in fp32; the division
// takes the sign of the call's scale, so factors are positive. A row that is not finite has a NaN factor.
//   codes: fp16, for quantized pages.   dense: in the type of dense pages, what multiplies their rows; rest: what is
//   missing from it, if anything. For fp16 pages codes and dense are one plane.
// Word (k tile, b, lane) of row tile n: [n][k tile / 2][lane][k tile & 1][b]: a lane reads what it has written. So one
// row tile of a small head keeps `codes` in registers.
#pragma once

#include "kernels/cuda/attend_params.h"
#include "kernels/cuda/mma.cuh"

namespace kvq::cuda {

template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles>
struct QueryTile {
  static constexpr std::uint32_t kSteps = kD / 16, kPairs = (kSteps + 1) / 2, kTileBytes = kPairs * 512;
  static constexpr bool kHeld = holds_codes(kTiles, kD);

  std::uint32_t base;  // shared address of this warp's planes: codes unless only held, dense, rest
  bool has_rest;
  uint4 held[kHeld ? kPairs : 1];

  static constexpr std::uint32_t kPlaneBytes = kTiles * kTileBytes;
  static constexpr std::uint32_t kDenseAt = kType == Dtype::fp16 || kHeld ? 0 : kPlaneBytes;

  __device__ QueryTile(std::uint32_t base, bool has_rest) : base(base), has_rest(has_rest) {}

  // Fragments of k tiles 2 pair and 2 pair + 1: x, y and z, w.
  __device__ __forceinline__ uint4 codes(std::uint32_t tile, std::uint32_t pair, std::uint32_t lane) const {
    if constexpr (kHeld) return held[pair];
    return load_shared4(base + tile * kTileBytes + pair * 512 + lane * 16);
  }
  __device__ __forceinline__ uint4 dense(std::uint32_t tile, std::uint32_t pair, std::uint32_t lane) const {
    if constexpr (kHeld && kType == Dtype::fp16) return held[pair];
    return load_shared4(base + kDenseAt + tile * kTileBytes + pair * 512 + lane * 16);
  }
  __device__ __forceinline__ uint4 rest(std::uint32_t tile, std::uint32_t pair, std::uint32_t lane) const {
    return load_shared4(base + kDenseAt + kPlaneBytes + tile * kTileBytes + pair * 512 + lane * 16);
  }

  // Shared address of an element as dense() has it; kPlaneBytes further on is its rest, if there is one.
  __device__ std::uint32_t element(std::uint32_t row, std::uint32_t channel) const {
    const std::uint32_t step = channel / 16, b = channel % 16 / 8, lane = 4 * (row % 8) + channel % 8 / 2;
    return base + kDenseAt + row / 8 * kTileBytes + step / 2 * 512 + lane * 16 + (step % 2) * 8 + b * 4 +
           channel % 2 * 2;
  }
};

// Channels 16 k + 2 t + {0, 1, 8, 9} of a row; two at once where the row is aligned to pairs.
template <std::uint32_t kSteps>
__device__ inline void read_row(const AttendParams& p, std::int64_t row, std::uint32_t t, float (&x)[kSteps][4]) {
  const auto convert = [&](std::uint32_t bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    return p.q_type == Real::fp16 ? element_value<Dtype::fp16>(half) : element_value<Dtype::bf16>(half);
  };
  if (p.q_type == Real::fp32) {
    const float* const from = static_cast<const float*>(p.q) + row + 2 * t;
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps * 4; ++i)
      x[i / 4][i % 4] = __ldg(from + 16 * (i / 4) + (i & 1) + 8 * (i / 2 % 2));
    return;
  }
  const std::uint16_t* const from = static_cast<const std::uint16_t*>(p.q) + row + 2 * t;
  if (reinterpret_cast<std::uint64_t>(from) % 4 == 0) {
    const auto* const pairs = reinterpret_cast<const std::uint32_t*>(from);
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps * 2; ++i) {
      const std::uint32_t pair = __ldg(pairs + 4 * i);
      x[i / 2][i % 2 * 2] = convert(pair);
      x[i / 2][i % 2 * 2 + 1] = convert(pair >> 16);
    }
    return;
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kSteps * 4; ++i) {
    x[i / 4][i % 4] = convert(__ldg(from + 16 * (i / 4) + (i & 1) + 8 * (i / 2 % 2)));
  }
}

// Exact remainder of a rounding to `kType`, rounded in its turn.
template <Dtype kType>
__device__ inline std::uint32_t pack_rest(float low, float high, std::uint32_t rounded) {
  const float2 near = unpack_pair<kType>(rounded);
  return pack_pair<kType>(low - near.x, high - near.y);
}

// Writes one row tile's fragments and returns the factor of row g (in all lanes of the row).
template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles>
__device__ inline float fill_rows(const AttendParams& p, QueryTile<kD, kType, kTiles>& q, std::uint32_t tile,
                                  bool valid, std::int64_t row, std::uint32_t lane) {
  using Tile = QueryTile<kD, kType, kTiles>;
  constexpr std::uint32_t kSteps = Tile::kSteps;
  float x[kSteps][4] = {};
  if (valid) read_row<kSteps>(p, row, lane % 4, x);
  std::uint32_t part[4] = {};  // bits without their sign ascend with the value; what is not finite is beyond all else
#pragma unroll
  for (std::uint32_t k = 0; k < kSteps; ++k) {
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) part[i] = max(part[i], __float_as_uint(x[k][i]) & 0x7fffffffu);
  }
  std::uint32_t largest = max(max(part[0], part[1]), max(part[2], part[3]));
  for (int step = 1; step < 4; step <<= 1) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
  const int exponent = static_cast<int>(largest >> 23) - 128;
  const int by = largest == 0 ? 0 : max(-100, min(100, exponent));
  const float down = copysignf(__uint_as_float(static_cast<std::uint32_t>(127 - by) << 23), p.scale_log2);
#pragma unroll
  for (std::uint32_t pair = 0; pair < Tile::kPairs; ++pair) {
    std::uint32_t plane[4];
    float low[4], high[4];
    const std::uint32_t at = q.base + tile * Tile::kTileBytes + pair * 512 + lane * 16;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t k = 2 * pair + i / 2;
      low[i] = k < kSteps ? x[k % kSteps][i % 2 * 2] * down : 0;
      high[i] = k < kSteps ? x[k % kSteps][i % 2 * 2 + 1] * down : 0;
      plane[i] = pack_pair<Dtype::fp16>(low[i], high[i]);
    }
    if constexpr (Tile::kHeld) q.held[pair] = {plane[0], plane[1], plane[2], plane[3]};
    if (kType == Dtype::fp16 || !Tile::kHeld) store_shared4(at, {plane[0], plane[1], plane[2], plane[3]});
    if (kType == Dtype::bf16) {
#pragma unroll
      for (std::uint32_t i = 0; i < 4; ++i) plane[i] = pack_pair<kType>(low[i], high[i]);
      store_shared4(at + Tile::kDenseAt, {plane[0], plane[1], plane[2], plane[3]});
    }
    if (q.has_rest) {
#pragma unroll
      for (std::uint32_t i = 0; i < 4; ++i) plane[i] = pack_rest<kType>(low[i], high[i], plane[i]);
      store_shared4(at + Tile::kDenseAt + Tile::kPlaneBytes, {plane[0], plane[1], plane[2], plane[3]});
    }
  }
  constexpr std::uint32_t kInfinite = 0x7f800000;
  return __uint_as_float(largest < kInfinite ? static_cast<std::uint32_t>(127 + by) << 23 : 0x7fffffffu);
}

}  // namespace kvq::cuda
