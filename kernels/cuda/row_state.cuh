// Online softmax of a tile's rows in a warp's registers, in exponents of two.
//
// Invariant: (reference, sum, out) stands for 2^reference * (sum, out) over the keys seen so far; empty is (-inf, 0,
// 0), and a true -inf is the only mark of "nothing". The reference stays within kHead .. kSlack of the largest score,
// so it moves seldom. NaN scores of visible keys make the sum NaN, and that stays. A thread has rows 2 t and 2 t + 1 of
// each row tile, as C fragments do.
#pragma once

#include "kernels/cuda/attend_params.h"
#include "kernels/cuda/mma.cuh"

namespace kvq::cuda {

inline constexpr float kNothing = -__builtin_huge_valf();
inline constexpr float kHead = 8;    // a new reference is so far below its maximum: small weights keep their bits
inline constexpr float kSlack = 12;  // a score so far above the reference moves it; weights stay below 2^12

template <std::uint32_t kD, std::uint32_t kTiles>
struct RowState {
  float out[kD / 16][kTiles][4];
  float reference[kTiles][2], sum[kTiles][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
      for (std::uint32_t c = 0; c < kD / 16; ++c) out[c][n][0] = out[c][n][1] = out[c][n][2] = out[c][n][3] = 0;
      reference[n][0] = reference[n][1] = kNothing;
      sum[n][0] = sum[n][1] = 0;
    }
  }

  // What to subtract from scores: the reference, or anything finite while there is none.
  __device__ __forceinline__ float base(std::uint32_t n, std::uint32_t r) const {
    return reference[n][r] == kNothing ? 0 : reference[n][r];
  }

  // Makes room for scores up to `top`, the same in all lanes of a row.
  __device__ __forceinline__ void raise(const float (&top)[kTiles][2]) {
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      float keep[2];
#pragma unroll
      for (std::uint32_t r = 0; r < 2; ++r) {
        const float old = reference[n][r];
        if (top[n][r] > old + kSlack) reference[n][r] = top[n][r] - kHead;
        keep[r] = reference[n][r] == old ? 1.0f : exp2_fast(old - reference[n][r]);
        sum[n][r] *= keep[r];
      }
#pragma unroll
      for (std::uint32_t c = 0; c < kD / 16; ++c) {
#pragma unroll
        for (std::uint32_t i = 0; i < 4; ++i) out[c][n][i] *= keep[i & 1];
      }
    }
  }

  __device__ __forceinline__ bool must_raise(const float (&top)[kTiles][2]) const {
    bool higher = false;
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      higher |= top[n][0] > reference[n][0] + kSlack || top[n][1] > reference[n][1] + kSlack;
    }
    return __any_sync(kAllLanes, higher);
  }
};

// Largest of each row, over the lanes that share it.
template <std::uint32_t kTiles>
__device__ __forceinline__ void reduce_top(float (&top)[kTiles][2]) {
#pragma unroll
  for (int step = 4; step < 32; step <<= 1) {
#pragma unroll
    for (std::uint32_t n = 0; n < kTiles; ++n) {
      top[n][0] = fmaxf(top[n][0], __shfl_xor_sync(kAllLanes, top[n][0], step));
      top[n][1] = fmaxf(top[n][1], __shfl_xor_sync(kAllLanes, top[n][1], step));
    }
  }
}

template <std::uint32_t kTiles, std::uint32_t kTokenTiles>
__device__ __forceinline__ void lane_top(const float (&y)[kTiles][kTokenTiles][4], float (&top)[kTiles][2]) {
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
    top[n][0] = top[n][1] = kNothing;
#pragma unroll
    for (std::uint32_t m = 0; m < kTokenTiles; ++m) {
      top[n][0] = fmaxf(top[n][0], fmaxf(y[n][m][0], y[n][m][2]));
      top[n][1] = fmaxf(top[n][1], fmaxf(y[n][m][1], y[n][m][3]));
    }
  }
}

// What of a tile's rows a page needs to know.
struct TileRule {
  std::int32_t length;
  std::int32_t first_position;     // of the sequence's first query token
  std::int32_t low, high;          // positions of the tile's first and last rows
  std::uint32_t first_row, group;  // of the tile
  std::uint32_t first_head;        // query head of the KV head's first one
};

// From scores (in exponents of two) to logits that count: soft cap, ALiBi, and -inf where a row does not see a key.
template <bool kPlain, std::uint32_t kTiles, std::uint32_t kTokenTiles>
__device__ __forceinline__ void bend_scores(const AttendParams& p, const TileRule& rule, std::int32_t first_key,
                                            bool full, std::uint32_t lane, float (&y)[kTiles][kTokenTiles][4]) {
  if (!kPlain && p.softcap_log2 > 0) {
#pragma unroll
    for (std::uint32_t i = 0; i < kTiles * kTokenTiles * 4; ++i) {
      float& score = y[i / (4 * kTokenTiles)][i / 4 % kTokenTiles][i % 4];
      score = p.softcap_log2 * tanhf(score / p.softcap_log2);
    }
  }
  if (full && (kPlain || p.alibi == nullptr)) return;
#pragma unroll
  for (std::uint32_t n = 0; n < kTiles; ++n) {
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      const std::uint32_t row = rule.first_row + 8 * n + lane % 4 * 2 + r;
      const std::uint32_t token = row / rule.group;
      const std::int32_t position = rule.first_position + static_cast<std::int32_t>(token);
      float slope = 0;
      if (!kPlain && p.alibi != nullptr) {
        slope = __ldg(p.alibi + rule.first_head + (row - token * rule.group)) * 1.44269504f;
      }
      // The row sees the keys from `begin` on, `count` of them.
      const std::int32_t end = p.causal ? min(rule.length, position + 1) : rule.length;
      const std::int32_t begin = p.window >= 0 ? max(0, position - p.window + 1) : 0;
      const auto count = static_cast<std::uint32_t>(max(0, end - begin));
      const std::int32_t first = first_key + static_cast<std::int32_t>(lane / 4);
#pragma unroll
      for (std::uint32_t i = 0; i < 2 * kTokenTiles; ++i) {
        const std::int32_t key = first + static_cast<std::int32_t>(8 * i);
        float& score = y[n][i / 2][i % 2 * 2 + r];
        if (!kPlain) score -= slope * fabsf(static_cast<float>(position - key));
        if (static_cast<std::uint32_t>(key - begin) >= count) score = kNothing;
      }
    }
  }
}

}  // namespace kvq::cuda
