// Bringing blocks of pages into shared memory while others are worked on.
//
// Invariant: one warp, the courier, loads; the others work. load() and wait() of a buffer's `arrived` alternate, and so
// do leave() by every working warp and the courier's wait() for `left`: nobody still reads what the next copy
// overwrites. Where the chip has a bulk copy engine (sm_90 on) one lane asks for a whole block; elsewhere the courier's
// lanes ask for its chunks. Both end at the same barrier.
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

struct BlockCopy {
  // Of both barriers of a buffer, by one thread, before a __syncthreads().
  __device__ static void init(std::uint64_t* arrived, std::uint64_t* left, std::uint32_t working_warps) {
    init(arrived, KVQ_BULK_COPY ? 1 : 33);
    init(left, working_warps);
#if KVQ_BULK_COPY
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Starts the copy of `bytes` (a multiple of 16, less than 1 MiB, or 0); all lanes of the courier. What lane 0 wrote
  // to shared memory before is seen by everybody after wait(). A page that is rewritten is not read again soon, so its
  // lines go first from the second-level cache.
  __device__ static void load(std::byte* to, const std::byte* from, std::uint32_t bytes, std::uint64_t* arrived) {
    const std::uint32_t at = shared_address(to), done = shared_address(arrived);
#if KVQ_BULK_COPY
    if (threadIdx.x % 32 != 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(done), "r"(bytes) : "memory");
    if (bytes == 0) return;
    std::uint64_t once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(at),
        "l"(from), "r"(bytes), "r"(done), "l"(once)
        : "memory");
#else
    for (std::uint32_t i = threadIdx.x % 32 * 16; i < bytes; i += 512) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + i), "l"(from + i) : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(done) : "memory");
    if (threadIdx.x % 32 == 0) leave(arrived);
#endif
  }

  __device__ static void leave(std::uint64_t* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
  }

  // Until the given turn (0, 1, 0, ...) of a barrier is over.
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

 private:
  __device__ static void init(std::uint64_t* barrier, std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
  }
};

}  // namespace kvq::cuda
