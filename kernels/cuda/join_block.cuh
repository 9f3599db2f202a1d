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

// What the warps of a block keep for it.
struct BlockTiles {
  SharedTile tile[kMaxWarps];  // of the unit's last piece; rows 0: it has none to keep
  SharedTile first;            // the tile that ends early in the block's first unit, if that did not begin it
  bool begins[kMaxWarps];      // whether that last piece begins its tile
  bool ends_early[kMaxWarps];  // whether the unit's first piece ends a tile that the unit before has begun
  Arrivals arrivals;

  __device__ void init(std::uint32_t warp, std::uint32_t lane) {
    if (lane != 0) return;
    tile[warp].rows = 0;
    begins[warp] = ends_early[warp] = false;
    if (warp == 0) arrivals.tile[0].rows = arrivals.tile[1].rows = 0;
  }

  // All lanes of a warp: a piece that is not the whole of its tile, the unit's last one or not.
  __device__ void note(bool last, std::uint32_t warp, std::uint32_t lane, const SharedTile& of, bool begins_tile) {
    if (lane == 0 && last) {
      tile[warp] = of;
      begins[warp] = begins_tile;
    } else if (lane == 0) {
      ends_early[warp] = true;
      if (warp == 0) first = of;
    }
    __syncwarp();
  }
};

static_assert(sizeof(BlockTiles) <= kStaticBytes);

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
  constexpr std::uint32_t kWarps = block_warps(kD, kRows / 8);
  const float* const written = p.early + std::uint64_t{early} * partial_floats(kRows, kD);
  float* const part = p.partials + (2 * blockIdx.x + (tile.first_block == blockIdx.x ? 1u : 0u)) *
                                       std::uint64_t{partial_floats(kRows, kD)};
  for (std::uint32_t i = threadIdx.x * 4; i < tile.rows * kD; i += blockDim.x * 4) {
    const std::uint32_t row = i / kD, channel = i % kD;
    JoinedRow part_of[kWarps + 1];
#pragma unroll
    for (std::uint32_t w = 0; w < kWarps; ++w) {
      if (w < leader || w >= end) continue;
      const float* const state = states + w * stride;
      part_of[w] = {state[kRows * kStateStride<kD> + row], state[kRows * kStateStride<kD> + kRows + row],
                    *reinterpret_cast<const float4*>(state + row * kStateStride<kD> + channel)};
    }
    if (early != kNoUnit) part_of[kWarps] = read_part<kD, kRows>(written, row, channel);
    JoinedRow joined;
    joined.add(part_of);
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
__device__ inline void join_block(const AttendParams& p, BlockTiles& kept, float* states, std::uint32_t stride,
                                  std::uint32_t warps) {
  const std::uint32_t lane = threadIdx.x % 32, first_unit = blockIdx.x * warps;
  const bool is_warp = lane < warps;
  const unsigned keeps = __ballot_sync(kAllLanes, is_warp && kept.tile[lane].rows != 0);
  const unsigned begins = __ballot_sync(kAllLanes, is_warp && kept.begins[lane]);
  const unsigned ends_early = __ballot_sync(kAllLanes, is_warp && kept.ends_early[lane]);
  bool any = false;
  // Bit 0: the tile from an earlier block that ends early in the first unit, which keeps nothing of it; bit w + 1: the
  // one that warp w leads.
#pragma unroll 1
  for (unsigned tiles = (keeps & (begins | 1)) << 1 | (ends_early & 1); tiles != 0; tiles &= tiles - 1) {
    const auto after = static_cast<std::uint32_t>(__ffs(static_cast<int>(tiles)) - 1);
    const SharedTile& tile = after == 0 ? kept.first : kept.tile[after - 1];
    const unsigned with = (keeps & ~begins) >> after;
    const std::uint32_t end = after == 0 ? 0 : after + static_cast<std::uint32_t>(__ffs(static_cast<int>(~with)) - 1);
    const bool early = ((ends_early >> end) & 1) != 0;
    join_warps<kD, kRows>(p, tile, states, stride, after == 0 ? 0 : after - 1, end, early ? first_unit + end : kNoUnit);
    if (tile.blocks == 1) continue;
    any = true;
    if (threadIdx.x == 0) kept.arrivals.tile[tile.first_block == blockIdx.x ? 1 : 0] = tile;
  }
  if (!any) return;
  kept.arrivals.announce(p);
#pragma unroll 1
  for (std::uint32_t i = 0; i < 2; ++i) {
    if (!kept.arrivals.last[i]) continue;
    join_blocks<kD, kRows>(p, kept.arrivals.tile[i], reinterpret_cast<JoinedRow*>(states));
    __syncthreads();
  }
}

}  // namespace kvq::cuda
