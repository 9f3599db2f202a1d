// Joins the states of a block's warps that share a tile, when all of them have read their pages.
//
// Invariant: only the last piece of a unit can go on in the next one, so the warps of a block that share a tile are
// neighbours; the first of them leads. A tile that the block has alone is finished here, of any other the leader's
// place 1 gets the joined state.
#pragma once

#include "kernels/cuda/finish_row.cuh"
#include "kernels/cuda/schedule.cuh"

namespace kvq::cuda {

// Floats from one row's channels to the next one's: rows 2 t lie in different banks.
template <std::uint32_t kD>
inline constexpr std::uint32_t kStateStride = kD + 4;

// The piece of a tile whose state a unit keeps to the end; none if tail.rows is 0.
struct KeptPiece {
  UnitTail tail;             // as combine is to see it
  std::int32_t first_query;  // of the sequence
  bool begins;               // the tile begins in this unit,
  bool alone;                // and ends in this block
};

template <std::uint32_t kRows>
struct BlockStates {
  KeptPiece piece[kMaxWarps];
  float reference[kMaxWarps][kRows], sum[kMaxWarps][kRows];
};

static_assert(sizeof(BlockStates<8 * wide_tiles(64)>) <= kStaticBytes);

// Called on the unit's last piece, before its cursor steps on; `end` is where the unit ends.
template <std::uint32_t kRows>
__device__ inline KeptPiece kept_piece(const AttendParams& p, const Shares& shares, const Cursor<kRows>& cursor,
                                       const Piece& piece, std::uint32_t unit, std::uint32_t warps, std::uint64_t end) {
  const Sequence& sequence = cursor.now;
  const std::uint32_t rows = sequence.queries * p.group, first_row = piece.tile * kRows;
  KeptPiece kept{{0, kNoUnit, piece.sequence, piece.head, first_row, min(kRows, rows - first_row)},
                 sequence.first_query,
                 piece.begins,
                 false};
  if (!piece.begins) return kept;
  const std::uint64_t tile_end = end - cursor.left + sequence.cost;  // it begins at offset 0, with `left` to go
  const std::uint32_t end_unit = shares.unit_of(tile_end - 1);
  const bool early = shares.unit_begin(end_unit + 1) != tile_end;  // the last unit goes on to other tiles
  const std::uint32_t blocks = (end_unit - early) / warps - unit / warps + 1;
  kept.alone = blocks == 1 && !early;
  kept.tail.blocks = kept.alone ? 0 : blocks;
  kept.tail.end_unit = early ? end_unit : kNoUnit;
  return kept;
}

// All threads, after a barrier. Warp w's outputs begin at states + w * stride.
template <std::uint32_t kD, std::uint32_t kRows>
__device__ inline void join_block(const AttendParams& p, const BlockStates<kRows>& last, const float* states,
                                  std::uint32_t stride, std::uint32_t warps) {
  for (std::uint32_t leader = 0; leader < warps; ++leader) {
    const KeptPiece& piece = last.piece[leader];
    if (piece.tail.rows == 0 || (!piece.begins && leader != 0)) continue;
    std::uint32_t end = leader + 1;
    while (end < warps && last.piece[end].tail.rows != 0 && !last.piece[end].begins) ++end;
    float* const partial =
        p.partials + (2 * std::uint64_t{blockIdx.x * warps + leader} + 1) * partial_floats(kRows, kD);
    for (std::uint32_t i = threadIdx.x * 4; i < piece.tail.rows * kD; i += blockDim.x * 4) {
      const std::uint32_t row = i / kD, channel = i % kD;
      float reference = kNothing, sum = 0;
      float4 out{};
      for (std::uint32_t w = leader; w < end; ++w) reference = fmaxf(reference, last.reference[w][row]);
      for (std::uint32_t w = leader; w < end; ++w) {
        const float other = last.reference[w][row], take = other == kNothing ? 0 : exp2_fast(other - reference);
        const float4 more = *reinterpret_cast<const float4*>(states + w * stride + row * kStateStride<kD> + channel);
        sum += take * last.sum[w][row];
        out.x += take * more.x, out.y += take * more.y, out.z += take * more.z, out.w += take * more.w;
      }
      if (piece.alone) {
        const OutputRow to(p, piece.first_query, piece.tail.head, piece.tail.first_row + row);
        to.write4(p, channel, out, to.finish(p, reference, sum, channel == 0));
      } else {
        *reinterpret_cast<float4*>(partial + 2 * kRows + row * kD + channel) = out;
        if (channel == 0) partial[row] = reference, partial[kRows + row] = sum;
      }
    }
  }
}

}  // namespace kvq::cuda
