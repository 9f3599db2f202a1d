// Kernels of tests: plain loops, one thread or one grid.
#include <cuda_runtime.h>

#include "tests/gpu/device_code.h"

namespace kvq::test {
namespace {

__global__ void fill_words(std::uint32_t* words, std::uint64_t count, std::uint32_t first) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    words[i] = first + static_cast<std::uint32_t>(i);
  }
}

__global__ void random_values(std::uint32_t* words, std::uint64_t count) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
    const auto r = static_cast<std::uint32_t>(x >> 32);
    words[i] = (r & 0x83ff83ffu) | 0x3c003c00u;  // exponents 120 .. 127 of bf16
  }
}

__global__ void count_words(const std::uint32_t* words, std::uint64_t count, std::uint32_t first, std::uint32_t step,
                            unsigned long long* wrong) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  unsigned long long found = 0;
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    found += words[i] != first + step * static_cast<std::uint32_t>(i);
  }
  if (found != 0) atomicAdd(wrong, found);
}

__global__ void store_word(std::uint32_t* word, std::uint32_t value) { *word = value; }

__global__ void spin(std::uint64_t ns) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

__global__ void watch_word(const std::uint64_t* word, std::uint64_t last, volatile std::uint64_t* started, Seen* seen) {
  *started = 1;
  __threadfence_system();
  Seen out;
  for (const long long begin = clock64(); clock64() - begin < 10'000'000'000ll && out.last != last;) {
    std::uint64_t now;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(word) : "memory");
    out.changes += now != out.last;
    out.steps_back += now < out.last;
    out.last = now;
  }
  *seen = out;
}

int count_differing(std::uint64_t base, std::uint64_t bytes, std::uint32_t first, std::uint32_t step,
                    std::uint64_t& n) {
  unsigned long long* wrong = nullptr;
  if (const cudaError_t e = cudaMallocHost(&wrong, sizeof *wrong)) return e;
  *wrong = 0;
  count_words<<<512, 256>>>(reinterpret_cast<const std::uint32_t*>(base), bytes / 4, first, step, wrong);
  const cudaError_t e = cudaDeviceSynchronize();
  n = *wrong;
  cudaFreeHost(wrong);
  return e;
}

}  // namespace

int fill(std::uint64_t base, std::uint64_t bytes, std::uint32_t first) {
  fill_words<<<512, 256>>>(reinterpret_cast<std::uint32_t*>(base), bytes / 4, first);
  return cudaDeviceSynchronize();
}

int fill_values(std::uint64_t base, std::uint64_t bytes) {
  random_values<<<512, 256>>>(reinterpret_cast<std::uint32_t*>(base), bytes / 4);
  return cudaDeviceSynchronize();
}

int count_wrong(std::uint64_t base, std::uint64_t bytes, std::uint32_t first, std::uint64_t& wrong) {
  return count_differing(base, bytes, first, 1, wrong);
}

int count_nonzero(std::uint64_t base, std::uint64_t bytes, std::uint64_t& nonzero) {
  return count_differing(base, bytes, 0, 0, nonzero);
}

int write_word(std::uint64_t address, std::uint32_t value) {
  store_word<<<1, 1>>>(reinterpret_cast<std::uint32_t*>(address), value);
  return cudaDeviceSynchronize();
}

int start_spinning(std::uint32_t ms) {
  spin<<<1, 1>>>(ms * 1'000'000ull);
  return cudaGetLastError();
}

int finish() { return cudaDeviceSynchronize(); }

int watch(std::uint64_t address, std::uint64_t last, volatile std::uint64_t* started, Seen& seen) {
  Seen* out = nullptr;
  if (const cudaError_t e = cudaMallocHost(&out, sizeof *out)) return e;
  watch_word<<<1, 1>>>(reinterpret_cast<const std::uint64_t*>(address), last, started, out);
  const cudaError_t e = cudaDeviceSynchronize();
  seen = *out;
  cudaFreeHost(out);
  return e;
}

}  // namespace kvq::test
