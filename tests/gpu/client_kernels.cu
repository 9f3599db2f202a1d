// Plain loops; only scribble takes more than one thread.
#include <cuda_runtime.h>

#include "tests/gpu/client_kernels.h"

namespace kvq::test {
namespace {

__global__ void spin_for(std::uint64_t ns) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

__global__ void scribble(std::byte* const* pages, std::uint32_t count, std::uint32_t words, std::uint64_t ns) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  std::uint32_t round = 0;
  do {
    for (std::uint32_t page = blockIdx.x; page < count; page += gridDim.x) {
      auto* at = reinterpret_cast<volatile std::uint32_t*>(pages[page]);
      for (std::uint32_t i = threadIdx.x; i < words; i += blockDim.x) at[i] = round + i;
    }
    ++round;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

__global__ void store(volatile std::uint64_t* address, std::uint64_t value) { *address = value; }

}  // namespace

int spin_on(CUstream_st* stream, std::uint32_t ms) {
  spin_for<<<1, 1, 0, stream>>>(ms * 1'000'000ull);
  return cudaGetLastError();
}

int scribble_on(CUstream_st* stream, std::byte* const* pages, std::uint32_t count, std::uint32_t page_bytes,
                std::uint32_t ms) {
  scribble<<<64, 256, 0, stream>>>(pages, count, page_bytes / 4, ms * 1'000'000ull);
  return cudaGetLastError();
}

int store_on(CUstream_st* stream, const void* address, std::uint64_t value) {
  store<<<1, 1, 0, stream>>>(static_cast<std::uint64_t*>(const_cast<void*>(address)), value);
  return cudaGetLastError();
}

}  // namespace kvq::test
