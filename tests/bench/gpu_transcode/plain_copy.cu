// One launch for all chunks, four for each thread.
#include "tests/bench/gpu_transcode/plain_copy.h"
#include "tests/support/device_bytes.h"

namespace kvq::bench {
namespace {

constexpr std::uint32_t kThreads = 512, kChunks = 4;

__global__ void __launch_bounds__(kThreads) copy_kernel(const uint4* from, uint4* to, std::uint64_t chunks) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const std::uint64_t first = std::uint64_t{blockIdx.x} * kThreads * kChunks + threadIdx.x;
  uint4 w[kChunks];
#pragma unroll
  for (std::uint32_t i = 0; i < kChunks; ++i) {
    if (first + i * kThreads < chunks) w[i] = __ldcs(from + first + i * kThreads);
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kChunks; ++i) {
    if (first + i * kThreads < chunks) __stcs(to + first + i * kThreads, w[i]);
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace

void plain_copy(const std::byte* from, std::byte* to, std::uint64_t bytes, bool overlap, cudaStream_t stream) {
  const std::uint64_t chunks = bytes / 16, in_block = kThreads * kChunks;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>((chunks + in_block - 1) / in_block);
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = overlap;
  MUST(cudaLaunchKernelEx(&config, copy_kernel, reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to),
                          chunks));
}

}  // namespace kvq::bench
