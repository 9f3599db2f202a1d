// Joins the partial states of tiles that several units share.
//
// Invariant: a block looks after eight neighbouring units and every gridDim.y-th row of their tiles; a tile is joined
// where it begins. All partial states of a call are read after the kernel that writes them has ended.
#pragma once

#include "kernels/cuda/join_blocks.cuh"
#include "kernels/cuda/memory.cuh"

namespace kvq::cuda {

inline constexpr std::uint32_t kCombineUnits = 8;  // and warps of a block
inline constexpr std::uint32_t kAlone = 8;         // so many parts one warp joins faster alone

// Parts first, first + step, ... of one row: four channels of each lane.
__device__ inline void join_parts(const AttendParams& p, const UnitTail& tail, std::uint32_t unit, std::uint32_t warps,
                                  std::uint32_t row, std::uint32_t rows, std::uint32_t d, std::uint32_t first,
                                  std::uint32_t step, JoinedRow& joined) {
  const std::uint64_t floats = partial_floats(rows, d);
  const std::uint32_t channel = 4 * (threadIdx.x % 32), parts = tail.blocks + (tail.end_unit != kNoUnit ? 1 : 0);
#pragma unroll 4
  for (std::uint32_t i = first; i < parts; i += step) {
    const std::uint32_t from = i == 0 ? unit : i < tail.blocks ? (unit / warps + i) * warps : tail.end_unit;
    const float* const part = p.partials + (2 * std::uint64_t{from} + (i < tail.blocks ? 1 : 0)) * floats;
    float4 out{};
    if (channel < d) out = __ldcg(reinterpret_cast<const float4*>(part + 2 * rows + row * d + channel));
    joined.add(__ldcg(part + row), __ldcg(part + rows + row), out);
  }
}

__device__ inline void write_joined(const AttendParams& p, const UnitTail& tail, std::int32_t first_query,
                                    std::uint32_t row, std::uint32_t d, const JoinedRow& joined) {
  const std::uint32_t channel = 4 * (threadIdx.x % 32);
  if (channel < d) joined.finish(p, {tail.rows, tail.first_row, tail.head, first_query, 0, 0}, row, channel);
}

// The states of all warps in one, in warp 0.
__device__ inline void join_warps(JoinedRow& joined) {
  __shared__ JoinedRow states[kCombineUnits][32];
  const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  states[warp][lane] = joined;
  __syncthreads();
  if (warp != 0) return;
  for (std::uint32_t w = 1; w < kCombineUnits; ++w) {
    joined.add(states[w][lane].reference, states[w][lane].sum, states[w][lane].out);
  }
}

static __global__ void __launch_bounds__(kCombineUnits * 32)
    combine_kernel(const __grid_constant__ AttendParams p, std::uint32_t units, std::uint32_t warps, std::uint32_t rows,
                   std::uint32_t d) {
  let_next_launch_begin();
  wait_for_launch_before();
  const std::uint32_t warp = threadIdx.x / 32, first_unit = blockIdx.x * kCombineUnits;
  // Each lane below kCombineUnits has one unit's tail.
  UnitTail mine{};
  const std::uint32_t own = first_unit + threadIdx.x % 32;
  if (own < min(units, first_unit + kCombineUnits)) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(p.tails + own);
    mine = {__ldcg(words),     __ldcg(words + 1), __ldcg(words + 2),
            __ldcg(words + 3), __ldcg(words + 4), __ldcg(words + 5)};
  }
  // On its way while the states are read.
  const std::int32_t first_query_of_mine = mine.blocks != 0 ? __ldg(p.query_starts + mine.sequence) : 0;
  for (std::uint32_t i = 0; i < kCombineUnits; ++i) {
    UnitTail tail;
    tail.blocks = __shfl_sync(kAllLanes, mine.blocks, i);
    if (tail.blocks == 0) continue;
    tail.end_unit = __shfl_sync(kAllLanes, mine.end_unit, i);
    tail.sequence = __shfl_sync(kAllLanes, mine.sequence, i);
    tail.head = __shfl_sync(kAllLanes, mine.head, i);
    tail.first_row = __shfl_sync(kAllLanes, mine.first_row, i);
    tail.rows = __shfl_sync(kAllLanes, mine.rows, i);
    const std::int32_t first_query = __shfl_sync(kAllLanes, first_query_of_mine, i);
    const bool alone = tail.blocks <= kAlone;
    if (alone && i != warp) continue;
    for (std::uint32_t row = blockIdx.y; row < tail.rows; row += gridDim.y) {
      JoinedRow joined;
      join_parts(p, tail, first_unit + i, warps, row, rows, d, alone ? 0 : warp, alone ? 1 : kCombineUnits, joined);
      if (!alone) join_warps(joined);
      if (alone || warp == 0) write_joined(p, tail, first_query, row, d, joined);
    }
  }
}

}  // namespace kvq::cuda
