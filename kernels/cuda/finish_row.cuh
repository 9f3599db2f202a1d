// From a row's joined state to its output and log-sum-exp.
//
// Invariant: the sink joins here, once for each row; an empty row gives zeros and -inf, a NaN sum gives NaN.
#pragma once

#include "kernels/cuda/attend_params.h"
#include "kernels/cuda/row_state.cuh"

namespace kvq::cuda {

// A partial state: references[rows], sums[rows], outputs[rows][d].
KVQ_HD constexpr std::uint32_t partial_floats(std::uint32_t rows, std::uint32_t d) { return rows * (d + 2); }

struct OutputRow {
  std::int64_t at;   // of channel 0, in elements
  std::int64_t lse;  // index of the row in `lse`
  std::uint32_t head;

  __device__ OutputRow(const AttendParams& p, std::int32_t first_query, std::uint32_t kv_head, std::uint32_t row) {
    const std::uint32_t token = row / p.group;
    const std::int64_t query = std::int64_t{first_query} + token;
    head = kv_head * p.group + (row - token * p.group);
    at = query * p.out_token_stride + std::int64_t{head} * p.out_head_stride;
    lse = query * (p.kv_heads * p.group) + head;
  }

  // The factor for every element of the row; one lane writes the log-sum-exp.
  __device__ float finish(const AttendParams& p, float reference, float sum, bool writes) const {
    float keep = 1;
    const float sink = p.sinks != nullptr ? __ldg(p.sinks + head) * 1.44269504f : kNothing;
    if (sink > kNothing) {
      const float top = fmaxf(reference, sink);
      keep = exp2f(reference - top);
      sum = sum * keep + exp2f(sink - top);
      reference = top;
    }
    const bool empty = sum == 0;
    if (writes && p.lse != nullptr) p.lse[lse] = empty ? kNothing : (reference + log2f(sum)) * 0.693147181f;
    return empty ? 0 : keep / sum;
  }

  // `count` values, kStep channels from each to the next; from `channel` on.
  template <std::uint32_t kStep, std::uint32_t kCount>
  __device__ __forceinline__ void write(const AttendParams& p, std::uint32_t channel, const float (&x)[kCount],
                                        float keep) const {
    if (p.out_type == Real::fp32) {
      float* const to = static_cast<float*>(p.out) + at + channel;
#pragma unroll
      for (std::uint32_t i = 0; i < kCount; ++i) to[kStep * i] = x[i] * keep;
      return;
    }
    std::uint16_t* const to = static_cast<std::uint16_t*>(p.out) + at + channel;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) {
      const std::uint32_t bits =
          p.out_type == Real::fp16 ? pack_pair<Dtype::fp16>(x[i] * keep, 0) : pack_pair<Dtype::bf16>(x[i] * keep, 0);
      to[kStep * i] = static_cast<std::uint16_t>(bits);
    }
  }

  __device__ __forceinline__ void write4(const AttendParams& p, std::uint32_t channel, const float4& x,
                                         float keep) const {
    write<1>(p, channel, {x.x, x.y, x.z, x.w}, keep);
  }
};

}  // namespace kvq::cuda
