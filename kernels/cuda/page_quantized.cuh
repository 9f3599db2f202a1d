// Quantized pages: codes are operands of the tensor cores as they are stored, scales go into the other operand.
//
// Invariant: score = sum over channels of q (mid + (code - c) scale) = q . mid + sum (q scale) code - c sum (q scale),
// and alike for values with weights in place of q; a nibble is an fp16 subnormal, code * 2^-24, or 2^-20 in the rows g
// + 8, exactly. q * scale and weight * scale are rounded to fp16 once, and all their uses share that rounding. 8-bit
// keys are two planes of nibbles.
#pragma once

#include "kernels/cuda/query_tile.cuh"
#include "kernels/cuda/row_state.cuh"

namespace kvq::cuda {

inline constexpr float kCodeUnit = 16777216.0f;         // 2^24: undoes a low nibble's place,
inline constexpr float kCodeUnitHigh = kCodeUnit / 16;  // and that of a high nibble, in rows g + 8
inline constexpr std::uint32_t kOnes = 0x3c003c00u;     // pairs of fp16
inline constexpr std::uint32_t kMiddle4 = 0x47804780u;  // 7.5
inline constexpr std::uint32_t kMiddle8 = 0x57f857f8u;  // 127.5
inline constexpr std::uint32_t kSixteen = 0x4c004c00u;  // 16
inline constexpr float kWeightBits = 2;  // weights are up to 2^2 at a page's maximum, with scale within fp16

__device__ __forceinline__ Fragment all_of(std::uint32_t pair) { return {{pair, pair, pair, pair}}; }

__device__ __forceinline__ Fragment codes_of(std::uint32_t w) {
  return {{w & 0x000f000fu, w & 0x00f000f0u, (w >> 8) & 0x000f000fu, (w >> 8) & 0x00f000f0u}};
}

// Scales and midpoints of a pair of k tiles, or of a last one alone: scale words of (k tile, b) and an A fragment of
// midpoints whose rows g belong to the first k tile, rows g + 8 to the second.
struct Parameters {
  std::uint32_t scale[2][2];
  Fragment mid;
};

template <bool kAlone>
__device__ __forceinline__ Parameters load_parameters(std::uint32_t scales, std::uint32_t mids, std::uint32_t t) {
  if constexpr (kAlone) {
    const uint2 s = load_shared2(scales + t * 8), m = load_shared2(mids + t * 8);
    return {{{s.x, s.y}, {0, 0}}, {{m.x, 0, m.y, 0}}};
  } else {
    const uint4 s = load_shared4(scales + t * 16), m = load_shared4(mids + t * 16);
    return {{{s.x, s.y}, {s.z, s.w}}, {{m.x, m.y, m.z, m.w}}};
  }
}

// One pair of k tiles (or a last one) of the scores of 64 tokens.
template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles, bool kWide, bool kAlone>
__device__ __forceinline__ void score_pair(const QueryTile<kD, kType, kTiles>& q, std::uint32_t block,
                                           std::uint32_t pair, std::uint32_t lane, float (&y)[kTiles][4][4],
                                           float (&mids)[kTiles][2][4], float (&middle)[kTiles][4]) {
  constexpr BlockOffsets at = block_offsets(kWide ? Format::k8v4 : Format::int4, kD);
  const Parameters with =
      load_parameters<kAlone>(block + at.k_scale + pair * 64, block + at.k_mid + pair * 64, lane % 4);
  uint4 queries[kTiles];
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
    queries[n] = q.codes(n, pair, lane);
    mma<Dtype::fp16>(mids[n][0], with.mid, queries[n].x, queries[n].y);
    if (!kAlone) mma<Dtype::fp16>(mids[n][1], with.mid, queries[n].z, queries[n].w);
  }
#pragma unroll
  for (std::uint32_t k = 0; k < (kAlone ? 1 : 2); ++k) {
    std::uint32_t b[kTiles][2];
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      b[n][0] = multiply_pairs(k == 0 ? queries[n].x : queries[n].z, with.scale[k][0]);
      b[n][1] = multiply_pairs(k == 0 ? queries[n].y : queries[n].w, with.scale[k][1]);
      mma<Dtype::fp16>(middle[n], all_of(kWide ? kMiddle8 : kMiddle4), b[n][0], b[n][1]);
    }
#pragma unroll
    for (std::uint32_t plane = 0; plane < (kWide ? 2 : 1); ++plane) {
      const std::uint32_t from = kWide && plane == 0 ? at.k_low : at.k;
      const uint4 w = load_shared4(block + from + (2 * pair + k) * 512 + lane * 16);
      const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (std::uint32_t n = 0; n < kTiles; ++n) {
        if (kWide && plane == 1) {
          b[n][0] = multiply_pairs(b[n][0], kSixteen);
          b[n][1] = multiply_pairs(b[n][1], kSixteen);
        }
      }
#pragma unroll
      for (std::uint32_t m = 0; m < 4; ++m) {
        const Fragment codes = codes_of(words[m]);
#pragma unroll
        for (std::uint32_t n = 0; n < kTiles; ++n) mma<Dtype::fp16>(y[n][m], codes, b[n][0], b[n][1]);
      }
    }
  }
}

// Scores of 64 tokens in exponents of two: sums[n][m][i] * unit[i / 2][n][i & 1] + rest[n][i & 1], units positive or
// NaN.
template <std::uint32_t kTiles>
struct PageScores {
  float sums[kTiles][4][4];
  float unit[2][kTiles][2];  // of rows g and of rows g + 8
  float rest[kTiles][2];

  // From now on the sums are the scores.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
      for (std::uint32_t r = 0; r < 2; ++r) {
#pragma unroll
        for (std::uint32_t m = 0; m < 4; ++m) {
          sums[n][m][r] = fmaf(sums[n][m][r], unit[0][n][r], rest[n][r]);
          sums[n][m][2 + r] = fmaf(sums[n][m][2 + r], unit[1][n][r], rest[n][r]);
        }
        unit[0][n][r] = unit[1][n][r] = 1;
        rest[n][r] = 0;
      }
    }
  }

  // Scores that are all zero, or NaN.
  __device__ __forceinline__ void set(const float (&factor)[kTiles][2], float score) {
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
      for (std::uint32_t m = 0; m < 4; ++m) sums[n][m][0] = sums[n][m][1] = sums[n][m][2] = sums[n][m][3] = 0;
#pragma unroll
      for (std::uint32_t r = 0; r < 2; ++r) {
        unit[0][n][r] = unit[1][n][r] = 1;
        rest[n][r] = factor[n][r] * score;
      }
    }
  }
};

// `factor` is the row's, scale included.
template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles, bool kWide>
__device__ __forceinline__ void quantized_scores(const QueryTile<kD, kType, kTiles>& q, std::uint32_t block,
                                                 const float (&factor)[kTiles][2], std::uint32_t lane,
                                                 PageScores<kTiles>& y) {
  float mids[kTiles][2][4] = {}, middle[kTiles][4] = {};
#pragma unroll
  for (std::uint32_t i = 0; i < kTiles * 16; ++i) y.sums[i / 16][i / 4 % 4][i % 4] = 0;
#pragma unroll
  for (std::uint32_t pair = 0; pair < kD / 32; ++pair) {
    score_pair<kD, kType, kTiles, kWide, false>(q, block, pair, lane, y.sums, mids, middle);
  }
  if constexpr (kD % 32 != 0) {
    score_pair<kD, kType, kTiles, kWide, true>(q, block, kD / 32, lane, y.sums, mids, middle);
  }
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      y.rest[n][r] = (mids[n][0][r] + mids[n][1][2 + r] - middle[n][r]) * factor[n][r];
      y.unit[0][n][r] = factor[n][r] * kCodeUnit;
      y.unit[1][n][r] = factor[n][r] * kCodeUnitHigh;
    }
  }
}

// What the channels that int4_kN keeps add to settled scores; `list` is where their numbers are, the keys behind them.
// They are one k tile: rows of a channel's 64 keys, transposed, of which those that are not there repeat one that is
// and meet a query of zero.
template <std::uint32_t kD, Dtype kType, std::uint32_t kTiles>
__device__ __forceinline__ void kept_scores(const QueryTile<kD, kType, kTiles>& q, std::uint32_t list,
                                            std::uint32_t count, const float (&factor)[kTiles][2], std::uint32_t lane,
                                            float (&y)[kTiles][4][4]) {
  const std::uint32_t kept = list + kChannelListBytes, row = lane % 8;
  const unsigned used = __ballot_sync(kAllLanes, lane < count && load_shared_half(list + 2 * row) < kD);
  if (used == 0) return;
  const std::uint32_t from =
      ((used >> row) & 1) != 0 ? row : static_cast<std::uint32_t>(__ffs(static_cast<int>(used))) - 1;
  const std::uint32_t channels = load_shared1(list + lane % 4 * 4);  // 2 t, 2 t + 1
  Fragment keys[2];                                                  // tokens 0 .. 31, 32 .. 63
#pragma unroll
  for (std::uint32_t h = 0; h < 2; ++h)
    keys[h] = load_matrices<true>(kept + 2 * (from * kPageTokens + 32 * h + lane / 8 * 8));
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
    float sums[4][4] = {};
    std::uint32_t whole = 0, rest = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 2; ++i) {
      if (((used >> (lane % 4 * 2 + i)) & 1) == 0) continue;
      const std::uint32_t word = q.element(8 * n + lane / 4, (channels >> (16 * i)) & 0xffff);
      whole |= std::uint32_t{load_shared_half(word)} << (16 * i);
      if (q.has_rest) rest |= std::uint32_t{load_shared_half(word + q.kPlaneBytes)} << (16 * i);
    }
#pragma unroll
    for (std::uint32_t m = 0; m < 4; ++m) {
      const Fragment tokens{{keys[m / 2].r[m % 2 * 2], keys[m / 2].r[m % 2 * 2 + 1], 0, 0}};
      mma<kType>(sums[m], tokens, whole, 0);
      if (q.has_rest) mma<kType>(sums[m], tokens, rest, 0);
#pragma unroll
      for (std::uint32_t i = 0; i < 4; ++i) y[n][m][i] = fmaf(sums[m][i], factor[n][i & 1], y[n][m][i]);
    }
  }
}

// Scores -> weights of a whole page as B fragments, relative to the page's own maximum; `share` brings them to the
// state's reference. So fp16 weights lose nothing that counts, however far the page is below the maximum.
template <std::uint32_t kD, std::uint32_t kTiles>
__device__ __forceinline__ void page_weights(RowState<kD, kTiles>& state, const PageScores<kTiles>& y,
                                             std::uint32_t (&weight)[kTiles][4][2], float (&share)[kTiles][2]) {
  float top[kTiles][2];
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      float most[2];
#pragma unroll
      for (std::uint32_t h = 0; h < 2; ++h) {
        most[h] = fmaxf(fmaxf(y.sums[n][0][2 * h + r], y.sums[n][1][2 * h + r]),
                        fmaxf(y.sums[n][2][2 * h + r], y.sums[n][3][2 * h + r]));
        most[h] = fmaf(most[h], y.unit[h][n][r], y.rest[n][r]);
      }
      top[n][r] = fmaxf(kNothing, fmaxf(most[0], most[1]));
    }
  }
  reduce_top<kTiles>(top);
  if (state.must_raise(top)) state.raise(top);
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
    float rest[2];
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      rest[r] = y.rest[n][r] - ((top[n][r] == kNothing ? 0 : top[n][r]) - kWeightBits);
      share[n][r] = exp2_fast(top[n][r] - kWeightBits - state.base(n, r));
    }
#pragma unroll
    for (std::uint32_t m = 0; m < 4; ++m) {
#pragma unroll
      for (std::uint32_t h = 0; h < 2; ++h) {
        weight[n][m][h] =
            transpose(pack_pair<Dtype::fp16>(exp2_fast(fmaf(y.sums[n][m][2 * h], y.unit[h][n][0], rest[0])),
                                             exp2_fast(fmaf(y.sums[n][m][2 * h + 1], y.unit[h][n][1], rest[1]))));
      }
    }
    float sums[4] = {};
#pragma unroll
    for (std::uint32_t m = 0; m < 4; ++m) mma<Dtype::fp16>(sums, all_of(kOnes), weight[n][m][0], weight[n][m][1]);
    state.sum[n][0] = fmaf(sums[0], share[n][0], state.sum[n][0]);
    state.sum[n][1] = fmaf(sums[1], share[n][1], state.sum[n][1]);
  }
}

// Adds the products of up to four channel tiles, `kWidth` words of codes for each lane and token tile.
template <std::uint32_t kD, std::uint32_t kTiles, std::uint32_t kWidth>
__device__ __forceinline__ void add_values(RowState<kD, kTiles>& state, std::uint32_t codes, std::uint32_t group,
                                           const std::uint32_t (&b)[kTiles][4][2], const float (&rest)[kTiles][2],
                                           const float (&share)[kTiles][2], std::uint32_t lane) {
  std::uint32_t words[4][4];
#pragma unroll
  for (std::uint32_t k = 0; k < 4; ++k) {
    const std::uint32_t at = codes + k * (kD / 16 * 128) + group * 512 + lane * 4 * kWidth;
    if constexpr (kWidth == 4) {
      const uint4 w = load_shared4(at);
      words[k][0] = w.x, words[k][1] = w.y, words[k][2] = w.z, words[k][3] = w.w;
    } else if constexpr (kWidth == 2) {
      const uint2 w = load_shared2(at);
      words[k][0] = w.x, words[k][1] = w.y;
    } else {
      words[k][0] = load_shared1(at);
    }
  }
#pragma unroll
  for (std::uint32_t c = 0; c < kWidth; ++c) {
    float page[kTiles][4];
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      page[n][0] = rest[n][0] * (1 / kCodeUnit), page[n][1] = rest[n][1] * (1 / kCodeUnit);
      page[n][2] = rest[n][0] * (1 / kCodeUnitHigh), page[n][3] = rest[n][1] * (1 / kCodeUnitHigh);
    }
#pragma unroll
    for (std::uint32_t k = 0; k < 4; ++k) {
      const Fragment values = codes_of(words[k][c]);
#pragma unroll
      for (std::uint32_t n = 0; n < kTiles; ++n) mma<Dtype::fp16>(page[n], values, b[n][k][0], b[n][k][1]);
    }
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      float(&out)[4] = state.out[4 * group + c][n];
#pragma unroll
      for (std::uint32_t i = 0; i < 4; ++i) {
        out[i] = fmaf(page[n][i], share[n][i & 1] * (i < 2 ? kCodeUnit : kCodeUnitHigh), out[i]);
      }
    }
  }
}

// Adds the page's values. `part` is where codes, scales and midpoints of the values begin.
template <std::uint32_t kD, std::uint32_t kTiles>
__device__ __forceinline__ void quantized_values(RowState<kD, kTiles>& state, std::uint32_t part,
                                                 const std::uint32_t (&weight)[kTiles][4][2],
                                                 const float (&share)[kTiles][2], std::uint32_t lane) {
  constexpr BlockOffsets at = block_offsets(Format::int4, kD);
  std::uint32_t b[kTiles][4][2];
  float mids[kTiles][2][4] = {}, middle[kTiles][4] = {}, rest[kTiles][2];
#pragma unroll
  for (std::uint32_t pair = 0; pair < 2; ++pair) {
    const Parameters with =
        load_parameters<false>(part + at.v_scale - at.v + pair * 64, part + at.v_mid - at.v + pair * 64, lane % 4);
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
      for (std::uint32_t k = 0; k < 2; ++k) {
        const std::uint32_t tile = 2 * pair + k;
        mma<Dtype::fp16>(mids[n][k], with.mid, weight[n][tile][0], weight[n][tile][1]);
        b[n][tile][0] = multiply_pairs(weight[n][tile][0], with.scale[k][0]);
        b[n][tile][1] = multiply_pairs(weight[n][tile][1], with.scale[k][1]);
        mma<Dtype::fp16>(middle[n], all_of(kMiddle4), b[n][tile][0], b[n][tile][1]);
      }
    }
  }
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
    rest[n][0] = mids[n][0][0] + mids[n][1][2] - middle[n][0];
    rest[n][1] = mids[n][0][1] + mids[n][1][3] - middle[n][1];
  }
#pragma unroll
  for (std::uint32_t group = 0; group < kD / 64; ++group) {
    add_values<kD, kTiles, 4>(state, part, group, b, rest, share, lane);
  }
  if constexpr (kD % 64 != 0) {
    add_values<kD, kTiles, kD % 64 / 16>(state, part, kD / 64, b, rest, share, lane);
  }
}

}  // namespace kvq::cuda
