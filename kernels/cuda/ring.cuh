// A warp's own ring in shared memory: page data on its way in, a few pieces ahead of the arithmetic.
//
// Invariant: no other warp touches it, so the loop has no barrier between warps. Every stage completes one phase of its
// mbarrier per turn of the ring, with or without bytes. Bulk copies on sm_90 and later, 16-byte cp.async before.
#pragma once

#include <cstdint>

#include "kernels/cuda/mma.cuh"

namespace kvq::cuda {

// Bytes of one stage: up to two stretches of memory, one behind the other.
struct Copy {
  std::uint64_t from;  // 16-byte aligned
  std::uint32_t bytes;
  std::uint64_t from2;
  std::uint32_t bytes2;
};

struct Ring {
  std::uint32_t slots, barriers;  // shared addresses of this warp's stages
  std::uint32_t slot_bytes, stages;
  std::uint32_t stage = 0, phase = 0;
#if __CUDA_ARCH__ >= 900
  std::uint64_t policy = 0;
#endif

  __device__ void init(std::uint32_t lane) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      for (std::uint32_t s = 0; s < stages; ++s) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(barriers + 8 * s) : "memory");
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
#else
    if (lane == 0) {
      for (std::uint32_t s = 0; s < stages; ++s) {
        asm volatile("mbarrier.init.shared.b64 [%0],32;" ::"r"(barriers + 8 * s) : "memory");
      }
    }
#endif
    __syncwarp();
  }

  // All lanes call it with one lane's copy: lane `from` has it.
  template <bool kOnce>
  __device__ void start(std::uint32_t at, const Copy& mine, std::uint32_t from, std::uint32_t lane) const {
    const std::uint32_t to = slots + at * slot_bytes, barrier = barriers + 8 * at;
#if __CUDA_ARCH__ >= 900
    if (lane == from) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(mine.bytes + mine.bytes2)
                   : "memory");
      if (mine.bytes != 0) bulk<kOnce>(to, mine.from, mine.bytes, barrier);
      if (mine.bytes2 != 0) bulk<kOnce>(to + mine.bytes, mine.from2, mine.bytes2, barrier);
    }
#else
    const std::uint64_t from1 = __shfl_sync(kAllLanes, mine.from, from),
                        from2 = __shfl_sync(kAllLanes, mine.from2, from);
    const std::uint32_t bytes = __shfl_sync(kAllLanes, mine.bytes, from);
    const std::uint32_t bytes2 = __shfl_sync(kAllLanes, mine.bytes2, from);
    for (std::uint32_t i = lane * 16; i < bytes; i += 512) copy16(to + i, from1 + i);
    for (std::uint32_t i = lane * 16; i < bytes2; i += 512) copy16(to + bytes + i, from2 + i);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
  }

  // The current stage's bytes, once they are there.
  __device__ std::uint32_t wait() const {
    const std::uint32_t barrier = barriers + 8 * stage;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n .reg .pred p;\n W_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1,0x989680;\n @p bra D_%=;\n bra "
        "W_%=;\n"
        " D_%=:\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
#else
    asm volatile(
        "{\n .reg .pred p;\n W_%=:\n mbarrier.test_wait.parity.shared.b64 p,[%0],%1;\n @p bra D_%=;\n bra W_%=;\n"
        " D_%=:\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
#endif
    return slots + stage * slot_bytes;
  }

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }

 private:
#if __CUDA_ARCH__ >= 900
  template <bool kOnce>
  __device__ void bulk(std::uint32_t to, std::uint64_t from, std::uint32_t bytes, std::uint32_t barrier) const {
    if constexpr (kOnce) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::
              "r"(to),
          "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
          : "memory");
    } else {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to),
                   "l"(from), "r"(bytes), "r"(barrier)
                   : "memory");
    }
  }
#else
  __device__ static void copy16(std::uint32_t to, std::uint64_t from) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
  }
#endif
};

}  // namespace kvq::cuda
