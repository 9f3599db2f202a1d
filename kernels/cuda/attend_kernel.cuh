// Fused attention over pages of mixed formats: one template, one warp per share of the work.
//
// Invariant: a warp reads pages through its own ring and keeps its rows' state in registers; no barrier between warps
// before all their pages are done. A tile that is wholly a unit's is finished by it; the last one of a unit is joined
// in the block (join_block.cuh); one that ends early in the unit, having begun before it, becomes the partial state in
// place 0. Every unit writes its UnitTail. `kPlain` leaves out soft cap and ALiBi, nothing else.
//
// A value that is not finite reaches every row of the tile in which one sees it; a key or query that is not stays with
// its rows.
//
// Error bound, against the exact result on the same stored bytes, per element of an fp32 output:
//   |error| <= (exp(2 E) - 1 + 2^-10) * max|V|,   lse: |error| <= E + 2^-10 + 2^-20 |lse|
//   E, one logit: 2^-20 * scale * sum|q_i| (|k_i| + c s_i) + 2^-20 |logit|
//     + 2^-10 * scale * sqrt(sum (q_i (|k_i| + c s_i))^2) if the row sees quantized pages: q * scale in 11 bits, 6
//     standard deviations (c = 7.5 or 127.5); 2^-16 in place of 2^-10 for bf16 pages only, with queries that bf16 does
//     not hold.
//   2^-10: weights in 11 bits, each rounded by at most 2^-11 of itself, and weight * scale once more.
#pragma once

#include "kernels/cuda/join_block.cuh"
#include "kernels/cuda/page_dense.cuh"
#include "kernels/cuda/page_quantized.cuh"
#include "kernels/cuda/page_stream.cuh"

namespace kvq::cuda {

template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles, bool kPlain>
struct Attender {
  static constexpr std::uint32_t kRows = 8 * kTiles;
  using Stream = PageStream<kD, kRows, kTiles == kNarrowTiles>;

  const AttendParams& p;
  const std::uint32_t lane;
  const QueryTile<kD, kType> query;
  RowState<kD, kTiles> state;
  float factor[kTiles][2];
  TileRule rule;

  __device__ Attender(const AttendParams& p, std::uint32_t lane, std::uint32_t queries)
      : p(p), lane(lane), query(queries, kTiles, p.planes) {}

  __device__ __forceinline__ void begin_tile(const Piece& piece, const Sequence& sequence) {
    const std::uint32_t rows = sequence.queries * p.group, first_row = piece.tile * kRows;
    const std::uint32_t last_row = min(first_row + kRows, rows) - 1;
    rule.length = sequence.length;
    rule.first_position = sequence.length - sequence.queries;
    rule.low = rule.first_position + static_cast<std::int32_t>(first_row / p.group);
    rule.high = rule.first_position + static_cast<std::int32_t>(last_row / p.group);
    rule.first_row = first_row;
    rule.group = p.group;
    rule.first_head = piece.head * p.group;
    __syncwarp();
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      const std::uint32_t row = first_row + 8 * n + lane / 4, token = row / p.group;
      const std::int64_t at = (std::int64_t{sequence.first_query} + token) * p.q_token_stride +
                              std::int64_t{rule.first_head + (row - token * p.group)} * p.q_head_stride;
      const float mine = fill_rows<kD, kType>(p, query, n, row < rows, at, lane);
      factor[n][0] = __shfl_sync(kAllLanes, mine, lane % 4 * 8) * p.scale_log2;
      factor[n][1] = __shfl_sync(kAllLanes, mine, lane % 4 * 8 + 4) * p.scale_log2;
    }
    __syncwarp();
    state.clear();
  }

  __device__ __forceinline__ bool sees_all(std::int32_t first_key) const {
    return first_key + static_cast<std::int32_t>(kPageTokens) <= rule.length &&
           (!p.causal || first_key + static_cast<std::int32_t>(kPageTokens) - 1 <= rule.low) &&
           (p.window < 0 || first_key > rule.high - p.window);
  }

  __device__ __forceinline__ void dense_page(Stream& stream, std::int32_t first_key, bool full) {
    const std::int32_t end = p.causal ? min(rule.length, rule.high + 1) : rule.length;
    const std::int32_t begin = p.window < 0 ? 0 : rule.low - p.window + 1;
#pragma unroll 1
    for (std::uint32_t i = 0; i < kDensePieces; ++i) {
      const std::uint32_t piece = stream.wait();
      const std::int32_t key = first_key + static_cast<std::int32_t>(i * kPieceTokens);
      if (key < end && key + static_cast<std::int32_t>(kPieceTokens) > begin) {
        float y[kTiles][1][4];
        dense_scores<kD, kType, kTiles>(query, piece, factor, lane, y);
        bend_scores<kPlain, kTiles, 1>(p, rule, key, full, lane, y);
        ValueMask mask;
        if (!full) mask = ValueMask::of(begin - key, end - key, lane);
        dense_values<kD, kType, kTiles>(state, piece, y, mask, lane);
      }
      stream.release();
    }
  }

  __device__ __forceinline__ void page(Stream& stream, std::int32_t first_key) {
    const bool full = sees_all(first_key);
    const Kind kind = stream.kind();
    if (kind == Kind::dense) return dense_page(stream, first_key, full);
    float y[kTiles][4][4], share[kTiles][2];
    std::uint32_t weight[kTiles][4][2];
    std::uint32_t part = stream.wait();
    if (kind <= Kind::int4_k8) {
      quantized_scores<kD, kType, kTiles, false>(query, part, factor, lane, y);
      if (kind != Kind::int4) {
        kept_scores<kD, kType, kTiles>(query, part, kind == Kind::int4_k4 ? 4 : 8, factor, lane, y);
      }
      part += block_offsets(Format::int4, kD).v;
    } else if (kind == Kind::k8v4) {
      quantized_scores<kD, kType, kTiles, true>(query, part, factor, lane, y);
      stream.release();
      part = stream.wait();
    } else {  // zeros, or nothing that may be read
#pragma unroll
      for (std::uint32_t i = 0; i < kTiles * 16; ++i) {
        y[i / 16][i / 4 % 4][i % 4] = factor[i / 16][i & 1] * (kind == Kind::null ? 0.0f : __int_as_float(0x7fffffff));
      }
    }
    bend_scores<kPlain, kTiles, 4>(p, rule, first_key, full, lane, y);
    page_weights<kD, kTiles>(state, y, weight, share);
    if (kind <= Kind::k8v4) quantized_values<kD, kTiles>(state, part, weight, share, lane);
    stream.release();
  }

  // Rows of [reference], [sum] and [channel] with `stride` floats from one row's channels to the next one's.
  __device__ __forceinline__ void write_state(float* references, float* sums, float* outs, std::uint32_t stride,
                                              std::uint32_t rows) {
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
      for (std::uint32_t r = 0; r < 2; ++r) {
        const std::uint32_t row = 8 * n + lane % 4 * 2 + r;
        if (row >= rows) continue;
        float* const out = outs + row * stride + lane / 4;
#pragma unroll
        for (std::uint32_t c = 0; c < kD / 16; ++c) {
          out[16 * c] = state.out[c][n][r];
          out[16 * c + 8] = state.out[c][n][2 + r];
        }
        if (lane < 4) {
          references[row] = state.reference[n][r];
          sums[row] = state.sum[n][r];
        }
      }
    }
  }

  __device__ __forceinline__ void write_rows(const Piece& piece, const Sequence& sequence) {
    const std::uint32_t rows = sequence.queries * p.group;
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
      for (std::uint32_t r = 0; r < 2; ++r) {
        const std::uint32_t row = piece.tile * kRows + 8 * n + lane % 4 * 2 + r;
        if (row >= rows) continue;
        const OutputRow to(p, sequence.first_query, piece.head, row);
        const float keep = to.finish(p, state.reference[n][r], state.sum[n][r], lane < 4);
#pragma unroll
        for (std::uint32_t c = 0; c < kD / 16; ++c) {
          to.write(p, 16 * c + lane / 4, state.out[c][n][r] * keep);
          to.write(p, 16 * c + 8 + lane / 4, state.out[c][n][2 + r] * keep);
        }
      }
    }
  }
};

template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles, bool kPlain>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(1024) std::byte shared[];
  constexpr std::uint32_t kRows = 8 * kTiles;
  using Work = Attender<kD, kType, kTiles, kPlain>;
  __shared__ BlockStates<kRows> last;
  const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const std::uint32_t unit = blockIdx.x * warps + warp, units = gridDim.x * warps;
  // Per warp: ring, queries; then all barriers.
  const std::uint32_t ring_bytes = p.stages * p.slot_bytes;
  const std::uint32_t own_bytes = ring_bytes + p.planes * kTiles * QueryTile<kD, kType>::kTileBytes;
  const std::uint32_t own = shared_address(shared) + warp * own_bytes;
  Ring ring{own, shared_address(shared) + warps * own_bytes + warp * kMaxStages * 8, p.slot_bytes, p.stages};
  ring.init(lane);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::
                   : "memory");  // what comes before may still be writing anything that is read here
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const Shares shares = Shares::of(total_work<kRows>(p, lane), units);
  const std::uint64_t begin = shares.unit_begin(unit), end = shares.unit_begin(unit + 1);
  Cursor<kRows> cursor;
  cursor.heads = p.kv_heads;
  cursor.seek(p, begin, end - begin, lane);
  typename Work::Stream stream(p, lane);
  stream.begin(ring, cursor);
  Work work(p, lane, own + ring_bytes);
  KeptPiece kept{};
  Piece piece;
  while (cursor.next(p, piece)) {
    work.begin_tile(piece, cursor.now);
    for (std::uint32_t page = piece.page_begin; page < piece.page_end; ++page) {
      work.page(stream, static_cast<std::int32_t>(page * kPageTokens));
    }
    if (piece.begins && piece.ends) {
      work.write_rows(piece, cursor.now);
    } else if (!cursor.is_last()) {
      float* const at = p.partials + 2 * std::uint64_t{unit} * partial_floats(kRows, kD);
      work.write_state(at, at + kRows, at + 2 * kRows, kD, kRows);
    } else {
      kept = kept_piece<kRows>(p, shares, cursor, piece, unit, warps, end);
      auto* const outs = reinterpret_cast<float*>(shared + warp * own_bytes);
      work.write_state(last.reference[warp], last.sum[warp], outs, kStateStride<kD>, kept.tail.rows);
    }
    cursor.step();
  }
  if (lane == 0) {
    last.piece[warp] = kept;
    p.tails[unit] = kept.tail;
  }
  __syncthreads();
  join_block<kD, kRows>(p, last, reinterpret_cast<const float*>(shared), own_bytes / 4, warps);
}

}  // namespace kvq::cuda
