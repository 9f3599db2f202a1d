// What kernels/cuda/memory.cuh has, on the host.
#pragma once

#include "kernels/cuda/mma.cuh"

namespace kvq::cuda {

inline constexpr bool kBulkCopies = true;

template <std::uint32_t kAlignment>
std::byte* dynamic_shared() {
  return simt::shared_memory();
}
inline std::uint64_t load_entry_word(const std::uint64_t* entry) { return *entry; }
inline std::uint64_t load_host_word(const std::uint64_t* at) { return *at; }
inline void store_host_word(std::uint64_t* at, std::uint64_t word) { *at = word; }
inline void wait_for_launch_before() { simt::wait_for_launch_before(); }
inline void let_next_launch_begin() {}
inline unsigned long long add_in_order(unsigned long long* at, unsigned long long by) { return atomicAdd(at, by); }
inline void prepare_barrier(std::uint32_t barrier, std::uint32_t arrivals) { simt::prepare_barrier(barrier, arrivals); }
inline void arrive_barrier(std::uint32_t barrier) { simt::arrive(barrier); }
inline void prepared_barriers() {}
inline void wait_barrier(std::uint32_t barrier, std::uint32_t parity) { simt::wait_barrier(barrier, parity); }
inline std::uint64_t read_once_policy() { return 0; }
inline void expect_bytes(std::uint32_t barrier, std::uint32_t bytes) { simt::expect_bytes(barrier, bytes); }
template <bool kOnce>
void bulk_copy(std::uint32_t to, std::uint64_t from, std::uint32_t bytes, std::uint32_t barrier, std::uint64_t) {
  simt::copy(to, from, bytes, barrier);
}
inline void copy16(std::uint32_t, std::uint64_t) {}
inline void arrive_with_copies(std::uint32_t) {}

}  // namespace kvq::cuda
