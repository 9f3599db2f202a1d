// Online softmax of 64 rows in the registers of a warpgroup, in exponents of two: the work of the consumers.
//
// Invariant: (reference, sum, out) as in row_state.cuh, but a thread has rows g and g + 8 of its warp's 16 and only its
// own part of each sum, which finish_sums() adds up. The reference of a row moves only when the weights of a page say
// so, by their sum, so most pages leave the outputs to the tensor cores alone and no largest score is looked for;
// weights stay below kMostOfPage. They are rounded to the page's type, their sums are not.
#pragma once

#include "kernels/cuda/finish_row.cuh"
#include "kernels/cuda/prefill_stream.cuh"

namespace kvq::cuda {

// What the rows of this thread may see.
struct RowRule {
  std::int32_t length, position[2];
  std::int32_t low, high;  // positions of the warpgroup's first and last rows
  float slope[2];          // of ALiBi, in exponents of two
};

template <std::uint32_t kD, Dtype kType, bool kPlain>
struct RowGroup {
  float out[kD / 2];
  float reference[2], sum[2];
  RowRule rule;

  static constexpr std::uint32_t kHalfBytes = kGroupRows * 128;  // 64 channels of the rows

  // Rows from `first_row` on of a sequence and KV head; rows behind its end are zeros. The queries go to shared memory:
  // a barrier of the warpgroup must lie between this and the last products before, and between this and the next.
  __device__ __forceinline__ void begin(const AttendParams& p, const TilePiece& piece, std::uint32_t first_row,
                                        std::uint32_t thread, std::uint32_t queries) {
    const std::uint32_t rows = piece.of.queries * p.group;
    const std::int32_t start = piece.of.length - piece.of.queries;
    rule.length = piece.of.length;
    rule.low = start + static_cast<std::int32_t>(min(first_row, rows - 1) / p.group);
    rule.high = start + static_cast<std::int32_t>(min(first_row + kGroupRows - 1, rows - 1) / p.group);
    const bool negative = p.scale_log2 < 0;
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      const std::uint32_t row = first_row + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
      const std::uint32_t token = row / p.group, head = piece.head * p.group + (row - token * p.group);
      rule.position[r] = start + static_cast<std::int32_t>(token);
      rule.slope[r] = 0;
      if (!kPlain && p.alibi != nullptr && row < rows) rule.slope[r] = __ldg(p.alibi + head) * 1.44269504f;
      const std::int64_t at = (std::int64_t{piece.of.first_query} + token) * p.q_token_stride +
                              std::int64_t{head} * p.q_head_stride + thread % 4 * 2;
      const auto* from = static_cast<const std::uint16_t*>(p.q) + at;
      const bool paired = reinterpret_cast<std::uint64_t>(from) % 4 == 0;
#pragma unroll
      for (std::uint32_t k = 0; k < kD / 16; ++k) {
#pragma unroll
        for (std::uint32_t b = 0; b < 2; ++b) {
          const std::uint16_t* const x = from + 16 * k + 8 * b;
          std::uint32_t word = 0;
          if (row < rows) {
            word = paired ? __ldg(reinterpret_cast<const std::uint32_t*>(x))
                          : __ldg(x) | std::uint32_t{__ldg(x + 1)} << 16;
          }
          store_shared1(queries + k / 4 * kHalfBytes + (row - first_row) * 128 + ((2 * (k % 4) + b) ^ (row % 8)) * 16 +
                            thread % 4 * 4,
                        negative ? word ^ 0x80008000u : word);
        }
      }
      reference[r] = kNothing;
      sum[r] = 0;
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kD / 2; ++i) out[i] = 0;
  }

  // Asks for the scores of 64 keys.
  __device__ __forceinline__ static void ask_scores(std::uint32_t queries, std::uint32_t keys, float (&s)[32]) {
    products_begin();
#pragma unroll
    for (std::uint32_t k = 0; k < kD / 16; ++k) {
      warpgroup_mma<kType>(s, queries + (k / 4 * kHalfBytes + k % 4 * 32) / 16,
                           keys + (k / 4 * (kPageTokens * 128) + k % 4 * 32) / 16, k != 0);
    }
    products_commit();
  }

  // Asks for the products with 64 values.
  __device__ __forceinline__ void ask_values(std::uint32_t values, const std::uint32_t (&weight)[4][4]) {
    products_begin();
#pragma unroll
    for (std::uint32_t k = 0; k < 4; ++k) warpgroup_mma<kType>(out, weight[k], values + k * 2 * kAtomBytes / 16);
    products_commit();
  }

  __device__ __forceinline__ bool sees_all(const AttendParams& p, std::int32_t first_key) const {
    constexpr auto kAll = static_cast<std::int32_t>(kPageTokens);
    return first_key + kAll <= rule.length && (!p.causal || first_key + kAll - 1 <= rule.low) &&
           (p.window < 0 || first_key > rule.high - p.window);
  }

  // Soft cap and ALiBi, and -inf where a row does not see a key. Thread: keys 8 i + 2 t + e at s[4 i + 2 r + e].
  __device__ __forceinline__ void bend(const AttendParams& p, std::int32_t first_key, std::uint32_t lane,
                                       float (&s)[32]) const {
    const auto first = static_cast<std::int32_t>(lane % 4 * 2);
    if constexpr (!kPlain) {
      const float scale = fabsf(p.scale_log2);
#pragma unroll
      for (std::uint32_t i = 0; i < 32; ++i) {
        s[i] *= scale;
        if (p.softcap_log2 > 0) s[i] = p.softcap_log2 * tanhf(s[i] / p.softcap_log2);
        const std::int32_t key = first_key + first + static_cast<std::int32_t>(i / 4 * 8 + i % 2);
        s[i] -= rule.slope[i / 2 % 2] * fabsf(static_cast<float>(rule.position[i / 2 % 2] - key));
      }
    }
    if (sees_all(p, first_key)) return;
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      const std::int32_t end = (p.causal ? min(rule.length, rule.position[r] + 1) : rule.length) - first_key - first;
      const std::int32_t begin =
          p.window < 0 ? -static_cast<std::int32_t>(kPageTokens) : rule.position[r] - p.window + 1 - first_key - first;
#pragma unroll
      for (std::uint32_t i = 0; i < 16; ++i) {
        const auto key = static_cast<std::int32_t>(i / 2 * 8 + i % 2);
        float& score = s[i / 2 * 4 + 2 * r + i % 2];
        if (key >= end || key < begin) score = kNothing;
      }
    }
  }

  // Scores -> weights, as the references are. Products with the values of the page before may still be on their way.
  __device__ __forceinline__ void weigh(const AttendParams& p, std::int32_t first_key, std::uint32_t lane,
                                        float (&s)[32]) const {
    bend(p, first_key, lane, s);
    exponentials(p, {-reference[0], -reference[1]}, s);
    hold(s);
  }

  // Adds these weights up. False in the whole warpgroup, which meets here, if a reference has to move before: the
  // scores are lost then.
  __device__ __forceinline__ bool add_up(const float (&s)[32], std::uint32_t barrier) {
    float more[2];
    sums(s, more);
    // A row without a reference has infinity here, or no number.
    if (any_of_group(barrier, kGroupThreads, !(more[0] < kMostOfPage && more[1] < kMostOfPage))) return false;
    sum[0] += more[0], sum[1] += more[1];
    return true;
  }

  // Scores -> weights, with new references where they have to move. No products are on their way.
  __device__ __forceinline__ void raise_and_weigh(const AttendParams& p, std::int32_t first_key, std::uint32_t lane,
                                                  float (&s)[32]) {
    bend(p, first_key, lane, s);
    const float scale = kPlain ? fabsf(p.scale_log2) : 1;
    float less[2], more[2];
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      float top = kNothing;
#pragma unroll
      for (std::uint32_t i = 0; i < 8; ++i) top = fmaxf(top, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = scale * fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      const float old = reference[r];
      if (top > old + kRoom) reference[r] = top - kHead;
      const float keep = reference[r] == old ? 1.0f : exp2_fast(old - reference[r]);
      sum[r] *= keep;
#pragma unroll
      for (std::uint32_t i = 0; i < kD / 4; ++i) out[i / 2 * 4 + 2 * r + i % 2] *= keep;
      less[r] = reference[r] == kNothing ? 0 : -reference[r];
    }
    exponentials(p, less, s);
    sums(s, more);
    sum[0] += more[0], sum[1] += more[1];
  }

  // As A operands of four steps of 16 keys; only when no products are on their way.
  __device__ __forceinline__ static void pack(const float (&s)[32], std::uint32_t (&weight)[4][4]) {
#pragma unroll
    for (std::uint32_t i = 0; i < 16; ++i) weight[i / 4][i % 4] = pack_pair<kType>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void finish_sums() {
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
    }
  }

  // To a partial state of `rows` rows; `row` is this thread's first in the tile.
  __device__ __forceinline__ void write_state(float* to, std::uint32_t rows, std::uint32_t row,
                                              std::uint32_t lane) const {
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      float* const channels = to + 2 * rows + (row + 8 * r) * kD + lane % 4 * 2;
#pragma unroll
      for (std::uint32_t i = 0; i < kD / 8; ++i) {
        *reinterpret_cast<float2*>(channels + 8 * i) = {out[4 * i + 2 * r], out[4 * i + 2 * r + 1]};
      }
      if (lane % 4 == 0) to[row + 8 * r] = reference[r], to[rows + row + 8 * r] = sum[r];
    }
  }

  // To the output; `row` is this thread's first of the sequence and KV head.
  __device__ __forceinline__ void write_rows(const AttendParams& p, const TilePiece& piece, std::uint32_t row,
                                             std::uint32_t lane) const {
#pragma unroll
    for (std::uint32_t r = 0; r < 2; ++r) {
      if (row + 8 * r >= piece.of.queries * p.group) continue;
      const OutputRow to(p, piece.of.first_query, piece.head, row + 8 * r);
      const float keep = to.finish(p, reference[r], sum[r], lane % 4 == 0);
#pragma unroll
      for (std::uint32_t i = 0; i < kD / 8; ++i) {
        write_pair(p, to.at + 8 * i + lane % 4 * 2, out[4 * i + 2 * r] * keep, out[4 * i + 2 * r + 1] * keep);
      }
    }
  }

 private:
  // A thread's part of a row has 16 keys of a page: with all of them kRoom above the reference the sum stays below
  // kMostOfPage, so that a reference which need not move is not looked at again. fp16 holds any weight below that.
  static constexpr float kRoom = 10, kMostOfPage = 32768;

  // 2^(score + less).
  __device__ __forceinline__ static void exponentials(const AttendParams& p, const float (&less)[2], float (&s)[32]) {
    const float scale = kPlain ? fabsf(p.scale_log2) : 1;
#pragma unroll
    for (std::uint32_t i = 0; i < 32; ++i) s[i] = exp2_fast(fmaf(s[i], scale, less[i / 2 % 2]));
  }
  __device__ __forceinline__ static void sums(const float (&s)[32], float (&more)[2]) {
    more[0] = more[1] = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 32; ++i) more[i / 2 % 2] += s[i];
  }

  __device__ static __forceinline__ void write_pair(const AttendParams& p, std::int64_t at, float low, float high) {
    if (p.out_type == Real::fp32) {
      float* const to = static_cast<float*>(p.out) + at;
      to[0] = low, to[1] = high;
      return;
    }
    const std::uint32_t pair =
        p.out_type == Real::fp16 ? pack_pair<Dtype::fp16>(low, high) : pack_pair<Dtype::bf16>(low, high);
    auto* const to = static_cast<std::uint16_t*>(p.out) + at;
    if (reinterpret_cast<std::uint64_t>(to) % 4 == 0) {
      *reinterpret_cast<std::uint32_t*>(to) = pair;
    } else {
      to[0] = static_cast<std::uint16_t>(pair), to[1] = static_cast<std::uint16_t>(pair >> 16);
    }
  }
};

}  // namespace kvq::cuda
