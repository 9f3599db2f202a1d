// One thread an element: this is data for benchmarks, not part of what they time.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tests/bench/gpu_node/values.h"

namespace kvq::bench {
namespace {

__global__ void fill(__half* k, __half* v, std::uint32_t seed, std::uint32_t layer, std::uint64_t first,
                     std::uint32_t heads, std::uint32_t head_dim, std::uint64_t elements) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  const auto channel = static_cast<std::uint32_t>(i % head_dim);
  const auto head = static_cast<std::uint32_t>(i / head_dim % heads);
  const std::uint64_t token = first + i / head_dim / heads;
  k[i] = __float2half_rn(kv_value(seed, layer, 0, head, token, channel));
  v[i] = __float2half_rn(kv_value(seed, layer, 1, head, token, channel));
}

__global__ void wait_ns(long long nanoseconds) {
  const auto now = [] {
    long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
  };
  for (const long long began = now(); now() - began < nanoseconds;) __nanosleep(1000);
}

}  // namespace

void spin(double seconds, CUstream_st* stream) { wait_ns<<<1, 32, 0, stream>>>(static_cast<long long>(seconds * 1e9)); }

void fill_kv(void* k, void* v, std::uint32_t seed, std::uint32_t layer, std::uint64_t first, std::uint32_t tokens,
             std::uint32_t heads, std::uint32_t head_dim, CUstream_st* stream) {
  const std::uint64_t elements = std::uint64_t{tokens} * heads * head_dim;
  const auto blocks = static_cast<unsigned>((elements + 255) / 256);
  fill<<<blocks, 256, 0, stream>>>(static_cast<__half*>(k), static_cast<__half*>(v), seed, layer, first, heads,
                                   head_dim, elements);
}

}  // namespace kvq::bench
