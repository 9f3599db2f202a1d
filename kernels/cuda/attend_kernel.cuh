// Fused attention over pages of mixed formats: one template, one warp per share of the work.
//
// Invariant: a warp reads pages through its own ring and keeps its rows' state in registers; no barrier between warps
// before all their pages are done. A tile that is wholly a unit's is finished by it; the last one of a unit is joined
// in the block (join_block.cuh), with what the next unit has written down of it if it ends early there. `kPlain` leaves
// out soft cap and ALiBi, nothing else.
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
  static constexpr bool kHalves = halves_pages(kTiles, kD, kBulkCopies);
  using Stream = PageStream<kD, kRows, kTiles == kNarrowTiles, kHalves>;

  const AttendParams& p;
  const std::uint32_t lane;
  QueryTile<kD, kType, kTiles> query;
  RowState<kD, kTiles> state;
  float factor[kTiles][2];
  TileRule rule;
  std::uint32_t full_begin, full_count;  // pages that every row of the tile sees whole

  __device__ Attender(const AttendParams& p, std::uint32_t lane, std::uint32_t queries)
      : p(p), lane(lane), query(queries, p.has_rest) {}

  __device__ __forceinline__ void begin_tile(const Piece& piece, const Sequence& sequence) {
    const std::uint32_t rows = sequence.queries * p.group, first_row = piece.tile * kRows;
    const std::uint32_t last_row = min(first_row + kRows, rows) - 1;
    const auto token_of = [&](std::uint32_t row) { return row < p.group ? 0 : row / p.group; };
    rule.length = sequence.length;
    rule.first_position = sequence.length - sequence.queries;
    rule.low = rule.first_position + static_cast<std::int32_t>(token_of(first_row));
    rule.high = rule.first_position + static_cast<std::int32_t>(token_of(last_row));
    rule.first_row = first_row;
    rule.group = p.group;
    rule.first_head = piece.head * p.group;
    constexpr auto kPage = static_cast<std::int32_t>(kPageTokens);
    const std::int32_t full_end = max(0, p.causal ? min(rule.length, rule.low + 1) : rule.length) / kPage;
    const std::int32_t first = p.window < 0 ? 0 : (max(0, rule.high - p.window + 1) + kPage - 1) / kPage;
    full_begin = static_cast<std::uint32_t>(first);
    full_count = static_cast<std::uint32_t>(max(0, full_end - first));
    __syncwarp();
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      const std::uint32_t row = first_row + 8 * n + lane / 4, token = token_of(row);
      const std::int64_t at = (std::int64_t{sequence.first_query} + token) * p.q_token_stride +
                              std::int64_t{rule.first_head + (row - token * p.group)} * p.q_head_stride;
      const float mine = fill_rows(p, query, n, row < rows, at, lane);
      factor[n][0] = __shfl_sync(kAllLanes, mine, lane % 4 * 8) * fabsf(p.scale_log2);
      factor[n][1] = __shfl_sync(kAllLanes, mine, lane % 4 * 8 + 4) * fabsf(p.scale_log2);
    }
    __syncwarp();
    state.clear();
  }

  __device__ __forceinline__ void dense_piece(std::uint32_t at, std::int32_t key, bool full) {
    const std::int32_t end = p.causal ? min(rule.length, rule.high + 1) : rule.length;
    const std::int32_t begin = p.window < 0 ? 0 : rule.low - p.window + 1;
    if (key >= end || key + static_cast<std::int32_t>(kPieceTokens) <= begin) return;
    float y[kTiles][1][4];
    dense_scores<kD, kType, kTiles>(query, at, factor, lane, y);
    bend_scores<kPlain, kTiles, 1>(p, rule, key, full, lane, y);
    ValueMask mask;
    if (!full) mask = ValueMask::of(begin - key, end - key, lane);
    dense_values<kD, kType, kTiles>(state, at, y, mask, lane);
  }

  // What a row does not see, and what bends its scores.
  __device__ __forceinline__ void bend(std::int32_t first_key, bool full, PageScores<kTiles>& y) {
    if (full && (kPlain || (p.softcap_log2 <= 0 && p.alibi == nullptr))) return;
    y.settle();
    bend_scores<kPlain, kTiles, 4>(p, rule, first_key, full, lane, y.sums);
  }

  // The page that nearly all are, by itself: what it shares with others it would pay for in moved registers.
  __device__ __forceinline__ void int4_page(std::uint32_t at, std::int32_t first_key, bool full) {
    PageScores<kTiles> y;
    std::uint32_t weight[kTiles][4][2];
    float share[kTiles][2];
    quantized_scores<kD, kType, kTiles, false>(query, at, factor, lane, y);
    bend(first_key, full, y);
    page_weights<kD, kTiles>(state, y, weight, share);
    quantized_values<kD, kTiles>(state, at + block_offsets(Format::int4, kD).v, weight, share, lane);
  }

  // The scores of a page whose keys are more than int4's, or none.
  __device__ __forceinline__ void other_scores(Kind kind, std::uint32_t at, PageScores<kTiles>& y) {
    if (kind == Kind::k8v4) return quantized_scores<kD, kType, kTiles, true>(query, at, factor, lane, y);
    if (kind >= Kind::null) return y.set(factor, kind == Kind::null ? 0.0f : __int_as_float(0x7fffffff));
    quantized_scores<kD, kType, kTiles, false>(query, at, factor, lane, y);
    y.settle();
    static_assert(block_offsets(Format::int4_k4, kD).channels == block_offsets(Format::int4_k8, kD).channels);
    kept_scores<kD, kType, kTiles>(query, at + block_offsets(Format::int4_k4, kD).channels,
                                   kept_channels(kind == Kind::int4_k4 ? Format::int4_k4 : Format::int4_k8), factor,
                                   lane, y.sums);
  }

  // Weights of a page of which only the values are to come.
  struct Weights {
    std::uint32_t weight[kTiles][4][2] = {};
    float share[kTiles][2] = {};
  };

  // Any page that is not dense; `keep`: its values come by themselves.
  __device__ __forceinline__ void other_page(Kind kind, std::uint32_t at, std::int32_t first_key, bool full,
                                             Weights& keep) {
    constexpr std::uint32_t kValues = block_offsets(Format::int4, kD).v,
                            kWideValues = block_offsets(Format::k8v4, kD).v;
    if (!kHalves || kind != Kind::values) {
      PageScores<kTiles> y;
      other_scores(kind, at, y);
      bend(first_key, full, y);
      page_weights<kD, kTiles>(state, y, keep.weight, keep.share);
      if (kind >= Kind::null || (kHalves && kind == Kind::k8v4)) return;
    }
    const std::uint32_t values = kHalves && kind == Kind::values ? 0 : kind == Kind::k8v4 ? kWideValues : kValues;
    quantized_values<kD, kTiles>(state, at + values, keep.weight, keep.share, lane);
  }

  // Pages [begin, end) of the tile, as the pieces come.
  __device__ __forceinline__ void pages(Stream& stream, std::uint32_t begin, std::uint32_t end) {
    std::uint32_t part = 0;  // of the page
    Weights keep;
#pragma unroll 1
    for (std::uint32_t page = begin; page < end;) {
      const Kind kind = stream.kind();
      const auto first_key = static_cast<std::int32_t>(page * kPageTokens);
      const bool full = page - full_begin < full_count;
      const std::uint32_t at = stream.wait();
      if (kind == Kind::int4) {
        int4_page(at, first_key, full);
      } else if (kind == Kind::dense) {
        dense_piece(at, first_key + static_cast<std::int32_t>(part * kPieceTokens), full);
        part = (part + 1) % kDensePieces;
      } else {
        other_page(kind, at, first_key, full, keep);
        part = kHalves && kind == Kind::k8v4;
      }
      stream.release();
      page += part == 0;
    }
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
        float out[kD / 8];
#pragma unroll
        for (std::uint32_t i = 0; i < kD / 8; ++i) out[i] = state.out[i / 2][n][i % 2 * 2 + r];
        to.template write<8>(p, lane / 4, out, keep);
      }
    }
  }
};

template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles, bool kPlain>
__global__ void __launch_bounds__(block_warps(kD, kTiles) * 32, 1)
    attend_kernel(const __grid_constant__ AttendParams p) {
  std::byte* const shared = dynamic_shared<128>();
  constexpr std::uint32_t kRows = 8 * kTiles;
  using Work = Attender<kD, kType, kTiles, kPlain>;
  __shared__ BlockTiles tiles;
  const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const std::uint32_t unit = blockIdx.x * warps + warp, units = gridDim.x * warps;
  // Per warp: ring, queries; then all barriers.
  const std::uint32_t ring_bytes = p.stages * p.slot_bytes, own_bytes = ring_bytes + p.query_bytes;
  const std::uint32_t own = shared_address(shared) + warp * own_bytes;
  Ring ring{own, shared_address(shared) + warps * own_bytes + warp * kMaxStages * 8, p.slot_bytes, p.stages};
  ring.init(lane);
  tiles.init(warp, lane);
  Shares shares;
  Cursor<kRows> cursor;
  cursor.heads = p.kv_heads;
  std::uint64_t end;
  typename Work::Stream stream(p, lane);
  // The first pages are asked for before the work in front has ended, from lengths and tables that it might still
  // change; then, when it cannot, whether they are what they were. If not, all is found again.
#pragma unroll 1
  for (bool early = kBulkCopies;; early = false) {
    Lengths lengths;
    std::uint64_t digest;
    shares = Shares::of(total_work<kRows>(p, lengths, digest, lane), units);
    end = shares.unit_begin(unit + 1);
    cursor.seek(p, lengths, shares.unit_begin(unit), end - shares.unit_begin(unit), lane);
    stream.look(cursor, !early);
    if (!early) break;
    stream.begin_early(ring);
    wait_for_launch_before();
    // Only now, so that what the next kernel finds early was there before this one's predecessor had ended.
    let_next_launch_begin();
    const std::int32_t number = stream.ask_again();
    if (stream.confirm(number, digest_lengths(p, lane) == digest)) break;
    stream.drop(ring);
  }
  stream.begin(ring);
  Work work(p, lane, own + ring_bytes);
  Piece piece;
  while (cursor.next(p, piece)) {
    work.begin_tile(piece, cursor.now);
    const bool whole = piece.begins && piece.ends, last = cursor.is_last();
    if (!whole) tiles.note(last, warp, lane, shared_tile<kRows>(p, shares, cursor, piece, warps, end), piece.begins);
    work.pages(stream, piece.page_begin, piece.page_end);
    if (whole) {
      work.write_rows(piece, cursor.now);
    } else if (!last) {
      float* const at = p.early + std::uint64_t{unit} * partial_floats(kRows, kD);
      work.write_state(at, at + kRows, at + 2 * kRows, kD, kRows);
    } else {
      auto* const outs = reinterpret_cast<float*>(shared + warp * own_bytes);
      work.write_state(outs + kRows * kStateStride<kD>, outs + kRows * (kStateStride<kD> + 1), outs, kStateStride<kD>,
                       tiles.tile[warp].rows);
    }
    cursor.step();
  }
  __syncthreads();
  join_block<kD, kRows>(p, tiles, reinterpret_cast<float*>(shared), own_bytes / 4, warps);
}

}  // namespace kvq::cuda
