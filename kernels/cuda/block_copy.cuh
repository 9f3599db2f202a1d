// Bringing blocks of pages into shared memory while others are worked on.
//
// Invariant: load() and wait() of one stage alternate; between a wait() and the next load() of that stage lies a
// __syncthreads(), so nobody still reads what the copy overwrites. Where the chip has a bulk copy engine (sm_90 on) one
// thread asks for a whole block; elsewhere every thread asks for its chunks. Both end at the same barrier.
#pragma once

#include <cstdint>

#include "kvq/types.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(KVQ_CUDA_WITHOUT_BULK_COPY)
#define KVQ_BULK_COPY 1
#else
#define KVQ_BULK_COPY 0
#endif

namespace kvq::cuda {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// One barrier per stage; all threads call everything here.
class BlockCopy {
 public:
  __device__ static void init(std::uint64_t* barrier) {
    const std::uint32_t arrivals = KVQ_BULK_COPY ? 1 : blockDim.x;
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
  }
  // After all init() by one thread, before a __syncthreads().
  __device__ static void init_done() {
#if KVQ_BULK_COPY
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Starts the copy of `bytes` (a multiple of 16, less than 1 MiB; 0 is allowed). By the bulk engine, what thread 0
  // wrote to shared memory before is seen by everybody after wait(); otherwise the arguments have to be known to all
  // threads anyway.
  __device__ static void load(std::byte* to, const std::byte* from, std::uint32_t bytes, std::uint64_t* barrier) {
    const std::uint32_t at = shared_address(to), done = shared_address(barrier);
#if KVQ_BULK_COPY
    if (threadIdx.x != 0) return;
    std::uint64_t once;  // a page that is rewritten is not read again
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(done), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(at),
        "l"(from), "r"(bytes), "r"(done), "l"(once)
        : "memory");
#else
    for (std::uint32_t i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + i), "l"(from + i) : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(done) : "memory");
#endif
  }

  // A second barrier per stage, of one arrival per warp, stands in for the __syncthreads() where the bulk engine copies
  // and warps work apart: thread 0 waits for it before the next load().
  __device__ static void init_left(std::uint64_t* barrier, std::uint32_t warps) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(warps) : "memory");
  }
  __device__ static void leave(std::uint64_t* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
  }

  // Until the copy of the given turn (0, 1, 0, ...) of a stage is there.
  __device__ static void wait(std::uint64_t* barrier, std::uint32_t turn) {
    const std::uint32_t at = shared_address(barrier);
    std::uint32_t done = 0;
    while (done == 0) {
#if KVQ_BULK_COPY
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(at), "r"(turn)
                   : "memory");
#else
      asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(at), "r"(turn)
                   : "memory");
#endif
    }
  }
};

}  // namespace kvq::cuda
