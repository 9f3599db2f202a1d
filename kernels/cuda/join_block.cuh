// Joins the states of tiles that several warps share: those of a block in the block, those of several blocks by the
// last one of these to arrive.
//
// Invariant: only the last piece of a unit can go on in the next one, so the warps of a block that share a tile are
// neighbours; the first of them leads. Of a tile that the block does not have alone it leaves one partial state: in
// place 0 if the tile began in an earlier block, else in place 1. At most one of each kind.
#pragma once

#include "kernels/cuda/join_blocks.cuh"
#include "kernels/cuda/schedule.cuh"

namespace kvq::cuda {

// A warp's state where its ring was: outputs, references, sums. Rows 2 t of the outputs lie in different banks.
template <std::uint32_t kD>
inline constexpr std::uint32_t kStateStride = kD + 4;

// What the warps of a block have kept.
struct BlockTiles {
  SharedTile tile[kMaxWarps];  // of the unit's last piece; rows 0: it had none to keep
  SharedTile first;            // the tile that ends early in the block's first unit, if that did not begin it
  bool begins[kMaxWarps];      // whether that last piece begins its tile
  bool ends_early[kMaxWarps];  // whether the unit's first piece ended a tile that the unit before had begun
};

static_assert(sizeof(BlockTiles) + sizeof(Arrivals) <= kStaticBytes);

// The piece's tile as other units see it. Called before the cursor steps on; `end` is where the unit ends.
template <std::uint32_t kRows>
__device__ inline SharedTile shared_tile(const AttendParams& p, const Shares& shares, const Cursor<kRows>& cursor,
                                         const Piece& piece, std::uint32_t warps, std::uint64_t end) {
  const Sequence& sequence = cursor.now;
  const std::uint32_t rows = sequence.queries * p.group, first_row = piece.tile * kRows;
  const std::uint64_t begin = end - cursor.left - cursor.offset;
  const std::uint32_t first_block = shares.unit_of(begin) / warps;
  return {
      min(kRows, rows - first_row), first_row,   piece.head,
      sequence.first_query,         first_block, shares.unit_of(begin + sequence.cost - 1) / warps - first_block + 1};
}

// Joins what warps [leader, end) keep, and what unit `early` has written down if there is one; all threads.
template <std::uint32_t kD, std::uint32_t kRows>
__device__ inline void join_warps(const AttendParams& p, const SharedTile& tile, const float* states,
                                  std::uint32_t stride, std::uint32_t leader, std::uint32_t end, std::uint32_t early) {
  const float* const written = p.early + std::uint64_t{early} * partial_floats(kRows, kD);
  float* const part = p.partials + (2 * blockIdx.x + (tile.first_block == blockIdx.x ? 1u : 0u)) *
                                       std::uint64_t{partial_floats(kRows, kD)};
  for (std::uint32_t i = threadIdx.x * 4; i < tile.rows * kD; i += blockDim.x * 4) {
    const std::uint32_t row = i / kD, channel = i % kD;
    JoinedRow joined;
#pragma unroll 2
    for (std::uint32_t w = leader; w < end; ++w) {
      const float* const state = states + w * stride;
      joined.add(state[kRows * kStateStride<kD> + row], state[kRows * kStateStride<kD> + kRows + row],
                 *reinterpret_cast<const float4*>(state + row * kStateStride<kD> + channel));
    }
    if (early != kNoUnit) {
      joined.add(__ldcg(written + row), __ldcg(written + kRows + row),
                 __ldcg(reinterpret_cast<const float4*>(written + 2 * kRows + row * kD + channel)));
    }
    if (tile.blocks == 1) {
      joined.finish(p, tile, row, channel);
    } else {
      *reinterpret_cast<float4*>(part + 2 * kRows + row * kD + channel) = joined.out;
      if (channel == 0) part[row] = joined.reference, part[kRows + row] = joined.sum;
    }
  }
}

// All threads, after a barrier. Warp w's state begins at states + w * stride.
template <std::uint32_t kD, std::uint32_t kRows>
__device__ inline void join_block(const AttendParams& p, const BlockTiles& kept, float* states, std::uint32_t stride,
                                  std::uint32_t warps) {
  __shared__ Arrivals arrivals;
  const std::uint32_t first_unit = blockIdx.x * warps;
  bool any = false;
  if (threadIdx.x < 2) arrivals.tile[threadIdx.x].rows = 0;
  __syncthreads();
#pragma unroll 1
  for (std::int32_t leader = kept.ends_early[0] ? -1 : 0; leader < static_cast<std::int32_t>(warps); ++leader) {
    const bool from_before = leader < 0;  // and ending in the first unit, which keeps nothing of it
    const SharedTile& tile = from_before ? kept.first : kept.tile[leader];
    if (tile.rows == 0 || (leader > 0 && !kept.begins[leader])) continue;
    std::uint32_t end = leader + 1;
    while (!from_before && end < warps && kept.tile[end].rows != 0 && !kept.begins[end]) ++end;
    const bool early = end < warps && kept.ends_early[end];
    join_warps<kD, kRows>(p, tile, states, stride, from_before ? end : leader, end, early ? first_unit + end : kNoUnit);
    if (tile.blocks == 1) continue;
    any = true;
    if (threadIdx.x == 0) arrivals.tile[tile.first_block == blockIdx.x ? 1 : 0] = tile;
  }
  if (!any) return;
  arrivals.announce(p);
#pragma unroll 1
  for (std::uint32_t i = 0; i < 2; ++i) {
    if (!arrivals.last[i]) continue;
    join_blocks<kD, kRows>(p, arrivals.tile[i], reinterpret_cast<JoinedRow*>(states));
    __syncthreads();
  }
}

}  // namespace kvq::cuda
