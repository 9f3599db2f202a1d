// Loads, stores and copies that the language has no words for: barriers of bulk copies, directory entries, the fault
// word, the order of launches.
//
// Invariant: shared memory is addressed by 32-bit shared addresses, as in mma.cuh. Nothing here knows what the bytes
// mean. Before Hopper a bulk copy is a copy by all lanes.
#pragma once

#include "kernels/cuda/mma.cuh"

namespace kvq::cuda {

#if __CUDA_ARCH__ >= 900
inline constexpr bool kBulkCopies = true;
#else
inline constexpr bool kBulkCopies = false;
#endif

// The block's dynamic shared memory.
template <std::uint32_t kAlignment>
__device__ __forceinline__ std::byte* dynamic_shared() {
  if constexpr (kAlignment == 1024) {
    extern __shared__ __align__(1024) std::byte dynamic1024[];
    return dynamic1024;
  } else {
    extern __shared__ __align__(128) std::byte dynamic128[];
    return dynamic128;
  }
}

// Past the first-level cache, so that a replayed graph sees what the daemon has published.
__device__ __forceinline__ std::uint64_t load_entry_word(const std::uint64_t* entry) {
  std::uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(word) : "l"(entry) : "memory");
  return word;
}

// Host memory, which not every machine can change atomically.
__device__ __forceinline__ std::uint64_t load_host_word(const std::uint64_t* at) {
  std::uint64_t word;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}
__device__ __forceinline__ void store_host_word(std::uint64_t* at, std::uint64_t word) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(at), "l"(word) : "memory");
}

// What comes before may still be writing anything that is read behind this.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// What all threads have written before a barrier is seen by who has seen this addition, and the other way round.
__device__ __forceinline__ unsigned long long add_in_order(unsigned long long* at, unsigned long long by) {
  unsigned long long before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0,[%1],%2;" : "=l"(before) : "l"(at), "l"(by) : "memory");
  return before;
}

// A barrier whose phases have so many arrivals. One thread prepares it; prepared_barriers() shows it to the copies.
__device__ __forceinline__ void prepare_barrier(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive_barrier(std::uint32_t barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state,[%0];\n}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void prepared_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void wait_barrier(std::uint32_t barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred p;\n W_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1,0x989680;\n @p bra D_%=;\n bra "
      "W_%=;\n"
      " D_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n .reg .pred p;\n W_%=:\n mbarrier.test_wait.parity.shared.b64 p,[%0],%1;\n @p bra D_%=;\n bra W_%=;\n"
      " D_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// A hint for copies of what is read once.
__device__ __forceinline__ std::uint64_t read_once_policy() {
  std::uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
#endif
  return policy;
}

// One lane arrives, and says that so many bytes will come.
__device__ __forceinline__ void expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// One lane: has 16-byte aligned bytes brought to shared memory.
template <bool kOnce>
__device__ __forceinline__ void bulk_copy(std::uint32_t to, std::uint64_t from, std::uint32_t bytes,
                                          std::uint32_t barrier, std::uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kOnce) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
  } else {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
  }
#endif
}

// Before Hopper. Each lane: 16 bytes; then that what it has asked for counts at the barrier when it is there.
__device__ __forceinline__ void copy16(std::uint32_t to, std::uint64_t from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void arrive_with_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace kvq::cuda
