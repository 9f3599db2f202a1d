// One block a row of an output, then one thread that counts the step: on one stream, so steps are never mixed.
#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstring>

#include "tests/bench/gpu_node/step_check.h"

namespace kvq::bench {
namespace {

constexpr unsigned kWarps = kHeadDim / 32;

struct Tally {
  unsigned long long steps, wrong;
  unsigned int worst, step_worst;  // bits of floats that are not negative: ordered as integers are
};

__device__ float sum_of_warp(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

__global__ void __launch_bounds__(kHeadDim)
    compare(const float* wanted, float* out, std::uint64_t layer_stride, Tally* tally) {
  __shared__ float errors[kWarps], norms[kWarps];
  const unsigned head = blockIdx.x, layer = blockIdx.y, channel = threadIdx.x;
  float* got = out + layer * layer_stride + head * kHeadDim + channel;
  const float is = *got, right = wanted[(layer * kQueryHeads + head) * kHeadDim + channel];
  *got = __int_as_float(-1);  // NaN
  const float error = sum_of_warp((is - right) * (is - right)), norm = sum_of_warp(right * right);
  if (channel % 32 == 0) {
    errors[channel / 32] = error;
    norms[channel / 32] = norm;
  }
  __syncthreads();
  if (channel != 0) return;
  float row_error = 0, row_norm = 0;
  for (unsigned w = 0; w < kWarps; ++w) {
    row_error += errors[w];
    row_norm += norms[w];
  }
  const float relative = sqrtf(row_error / row_norm);
  atomicMax(&tally->step_worst, __float_as_uint(relative <= FLT_MAX ? relative : INFINITY));
}

__global__ void count(Tally* tally, float tolerance) {
  ++tally->steps;
  if (!(__uint_as_float(tally->step_worst) < tolerance)) ++tally->wrong;
  tally->worst = max(tally->worst, tally->step_worst);
  tally->step_worst = 0;
}

}  // namespace

StepCheck::StepCheck(const std::vector<float>& wanted, float tolerance)
    : wanted_(wanted.size() * sizeof(float)), tally_(sizeof(Tally)), tolerance_(tolerance) {
  must(wanted.size() == std::size_t{kLayers} * kQueryHeads * kHeadDim ? cudaSuccess : cudaErrorInvalidValue,
       "values to compare with");
  must(cudaMemcpy(wanted_.as<void>(), wanted.data(), wanted.size() * sizeof(float), cudaMemcpyHostToDevice), "values");
  must(cudaMemset(tally_.as<void>(), 0, sizeof(Tally)), "tally");
  must(cudaDeviceSynchronize(), "values");  // llama's stream does not wait for the default one
}

void StepCheck::reset(Llama& llama) {
  llama.synchronize();
  must(cudaMemset(tally_.as<void>(), 0, sizeof(Tally)), "tally");
  must(cudaDeviceSynchronize(), "tally");
}

void StepCheck::enqueue(const Llama& llama) {
  const auto stride = static_cast<std::uint64_t>(llama.out(1) - llama.out(0));
  compare<<<dim3(kQueryHeads, kLayers), kHeadDim, 0, llama.stream()>>>(wanted_.as<float>(), llama.out(0), stride,
                                                                       tally_.as<Tally>());
  count<<<1, 1, 0, llama.stream()>>>(tally_.as<Tally>(), tolerance_);
  must(cudaGetLastError(), "check of a step");
}

StepCheck::Counts StepCheck::counts(Llama& llama) const {
  llama.synchronize();
  Tally tally{};
  must(cudaMemcpy(&tally, tally_.as<void>(), sizeof tally, cudaMemcpyDeviceToHost), "tally");
  float worst = 0;
  static_assert(sizeof worst == sizeof tally.worst);
  std::memcpy(&worst, &tally.worst, sizeof worst);
  return {tally.steps, tally.wrong, worst};
}

}  // namespace kvq::bench
