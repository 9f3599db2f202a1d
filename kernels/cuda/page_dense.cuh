// Dense pages, 16 tokens at a time: their keys, then their values, rows with swizzled chunks.
//
// Invariant: products are in the page's own type, so bf16 beyond fp16's range is exact; what q or the weights lose in
// it is added as a second product. Values that no row sees are zeroed before use: what an open page holds behind its
// end, NaN included, never meets a weight of zero.
#pragma once

#include "kernels/cuda/page_stream.cuh"
#include "kernels/cuda/query_tile.cuh"
#include "kernels/cuda/row_state.cuh"

namespace kvq::cuda {

template <std::uint32_t kD>
struct DenseLanes {  // where this lane points ldmatrix at, for the keys and for the values of a piece
  std::uint32_t row, chunk, swizzle;

  __device__ __forceinline__ DenseLanes(std::uint32_t lane, bool keys) {
    const std::uint32_t matrix = lane / 8;
    swizzle = lane % 8;
    row = (swizzle + 8 * (keys ? matrix & 1 : matrix >> 1)) * kD * 2;
    chunk = keys ? matrix >> 1 : matrix & 1;
  }
  // Of the 16 channels from 16 `step` on; dense_chunk() with the token's low bits in `swizzle`.
  __device__ __forceinline__ std::uint32_t at(std::uint32_t step) const {
    const std::uint32_t c = 2 * step + chunk;
    return row + (2 * step < (kD / 8 & ~7u) ? c ^ swizzle : c) * 16;
  }
};

template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles>
__device__ __forceinline__ void dense_scores(const QueryTile<kD, kType, kTiles>& q, std::uint32_t piece,
                                             const float (&factor)[kTiles][2], std::uint32_t lane,
                                             float (&y)[kTiles][1][4]) {
  float sums[kTiles][2][4] = {};
  const DenseLanes<kD> rows(lane, true);
#pragma unroll
  for (std::uint32_t step = 0; step < kD / 16; ++step) {
    const Fragment keys = load_matrices<false>(piece + rows.at(step));
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      const uint4 query = q.dense(n, step / 2, lane);
      mma<kType>(sums[n][step % 2], keys, step % 2 == 0 ? query.x : query.z, step % 2 == 0 ? query.y : query.w);
      if (q.has_rest) {
        const uint4 rest = q.rest(n, step / 2, lane);
        mma<kType>(sums[n][step % 2], keys, step % 2 == 0 ? rest.x : rest.z, step % 2 == 0 ? rest.y : rest.w);
      }
    }
  }
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) y[n][0][i] = (sums[n][0][i] + sums[n][1][i]) * factor[n][i & 1];
  }
}

// Which of 16 values count: pairs of tokens 2 t and 2 t + 8, as masks of fragment words.
struct ValueMask {
  std::uint32_t low = ~0u, high = ~0u;

  __device__ __forceinline__ static ValueMask of(std::int32_t begin, std::int32_t end, std::uint32_t lane) {
    const auto word = [&](std::int32_t token) {
      return (token >= begin && token < end ? 0xffffu : 0u) |
             (token + 1 >= begin && token + 1 < end ? 0xffff0000u : 0u);
    };
    const auto first = static_cast<std::int32_t>(lane % 4 * 2);
    return {word(first), word(first + 8)};
  }
};

// Scores of 16 tokens -> weights relative to the state's reference; adds sums and values.
template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles>
__device__ __forceinline__ void dense_values(RowState<kD, kTiles>& state, std::uint32_t piece,
                                             const float (&y)[kTiles][1][4], const ValueMask& mask,
                                             std::uint32_t lane) {
  constexpr bool kSplit = kType == Dtype::bf16;  // 8 bits of a weight are too few
  const std::uint32_t one = kType == Dtype::fp16 ? 0x3c003c00u : 0x3f803f80u;
  const Fragment ones{{one, one, one, one}};
  float top[kTiles][2];
  lane_top<kTiles, 1>(y, top);
  if (state.must_raise(top)) {
    reduce_top<kTiles>(top);
    state.raise(top);
  }
  std::uint32_t weight[kTiles][2], low[kTiles][2];
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
    float sums[4] = {};
#pragma unroll
    for (std::uint32_t h = 0; h < 2; ++h) {
      const float p0 = exp2_fast(y[n][0][2 * h] - state.base(n, 0));
      const float p1 = exp2_fast(y[n][0][2 * h + 1] - state.base(n, 1));
      const std::uint32_t pair = pack_pair<kType>(p0, p1);
      weight[n][h] = transpose(pair);
      low[n][h] = kSplit ? transpose(pack_rest<kType>(p0, p1, pair)) : 0;
    }
    mma<kType>(sums, ones, weight[n][0], weight[n][1]);
    if (kSplit) mma<kType>(sums, ones, low[n][0], low[n][1]);
    state.sum[n][0] += sums[0];
    state.sum[n][1] += sums[1];
  }
  const DenseLanes<kD> rows(lane, false);
#pragma unroll
  for (std::uint32_t step = 0; step < kD / 16; ++step) {
    Fragment values = load_matrices<true>(piece + kPieceTokens * kD * 2 + rows.at(step));
    values.r[0] &= mask.low, values.r[1] &= mask.low;
    values.r[2] &= mask.high, values.r[3] &= mask.high;
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      mma<kType>(state.out[step][n], values, weight[n][0], weight[n][1]);
      if (kSplit) mma<kType>(state.out[step][n], values, low[n][0], low[n][1]);
    }
  }
}

}  // namespace kvq::cuda
