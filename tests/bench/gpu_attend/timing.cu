// Replayed graphs between two events, and kernels that do nothing but read or copy. What is read has an effect that no
// compiler can rule out.
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/bench/gpu_attend/timing.h"
#include "tests/support/device_bytes.h"

namespace kvq::bench {
namespace {

constexpr int kReplays = 15, kLoads = 8, kThreads = 256;
constexpr std::uint64_t kBlockBytes = kThreads * kLoads * 16;

__device__ std::uint32_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185ull;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44dull;
  return static_cast<std::uint32_t>(x >> 32);
}

__global__ void fill(__half* at, std::uint64_t count, std::uint64_t seed) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    at[i] = __float2half(static_cast<float>(mixed(i + (seed << 40)) >> 8) * (2.0f / (1 << 24)) - 1);
  }
}

__global__ void __launch_bounds__(kThreads) read_all(const uint4* from, std::uint32_t* sink) {
  const std::uint64_t first = std::uint64_t{blockIdx.x} * (kBlockBytes / 16) + threadIdx.x;
  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) x[i] = __ldcs(from + first + i * kThreads);
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) sum += x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
  if (sum == 0x12345678) *sink = sum;
}

__global__ void __launch_bounds__(kThreads) copy_all(const uint4* from, uint4* to) {
  const std::uint64_t first = std::uint64_t{blockIdx.x} * (kBlockBytes / 16) + threadIdx.x;
  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) x[i] = __ldcs(from + first + i * kThreads);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) __stcs(to + first + i * kThreads, x[i]);
}

}  // namespace

double median_us(int launches, const std::function<void(int, cudaStream_t)>& enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t begin, end;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) enqueue(i, stream);
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<float> ms(kReplays);
  for (int i = -2; i < kReplays; ++i) {
    MUST(cudaEventRecord(begin, stream));
    MUST(cudaGraphLaunch(replay, stream));
    MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    if (i >= 0) MUST(cudaEventElapsedTime(&ms[i], begin, end));
  }
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
  MUST(cudaEventDestroy(begin));
  MUST(cudaEventDestroy(end));
  MUST(cudaStreamDestroy(stream));
  std::nth_element(ms.begin(), ms.begin() + kReplays / 2, ms.end());
  return 1000.0 * ms[kReplays / 2] / launches;
}

double read_ceiling_tb_s() {
  constexpr std::uint64_t kBytes = std::uint64_t{4} << 30;
  const test::DeviceBytes from(kBytes), sink(4);
  fill_halves(from.as<void>(), kBytes / 2, 1);
  const double us = median_us(4, [&](int, cudaStream_t stream) {
    read_all<<<kBytes / kBlockBytes, kThreads, 0, stream>>>(from.as<uint4>(), sink.as<std::uint32_t>());
  });
  return kBytes / us * 1e-6;
}

double copy_ceiling_tb_s() {
  constexpr std::uint64_t kBytes = std::uint64_t{2} << 30;
  const test::DeviceBytes from(kBytes), to(kBytes);
  fill_halves(from.as<void>(), kBytes / 2, 2);
  const double us = median_us(4, [&](int, cudaStream_t stream) {
    copy_all<<<kBytes / kBlockBytes, kThreads, 0, stream>>>(from.as<uint4>(), to.as<uint4>());
  });
  return 2 * kBytes / us * 1e-6;
}

void fill_halves(void* at, std::size_t count, std::uint32_t seed) {
  fill<<<4096, kThreads>>>(static_cast<__half*>(at), count, seed);
  MUST(cudaDeviceSynchronize());
}

}  // namespace kvq::bench
