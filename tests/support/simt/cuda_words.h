// The words of CUDA C++ that kernels use, for a C++ compiler; included in front of everything.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/support/simt/simt.h"

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline
#define threadIdx (::kvq::simt::thread_index)
#define blockIdx (::kvq::simt::block_index)
#define blockDim (::kvq::simt::block_size)
#define gridDim (::kvq::simt::grid_size)

template <typename T>
struct SimtShuffle {
  T value, result;
  std::uint32_t from;
};

template <typename T>
T simt_shuffle(const char* name, T value, std::uint32_t from) {
  SimtShuffle<T> mine{value, value, from};
  kvq::simt::meet(name, &mine, [](void* const* all) {
    for (int i = 0; i < 32; ++i) {
      auto* it = static_cast<SimtShuffle<T>*>(all[i]);
      it->result = static_cast<SimtShuffle<T>*>(all[it->from % 32])->value;
    }
  });
  return mine.result;
}
inline std::uint32_t simt_lane() { return threadIdx.x % 32; }
template <typename T>
T __shfl_sync(unsigned, T value, std::uint32_t from) {
  return simt_shuffle("shfl", value, from);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, std::uint32_t mask) {
  return simt_shuffle("shfl.xor", value, simt_lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, std::uint32_t by) {
  return simt_shuffle("shfl.up", value, simt_lane() >= by ? simt_lane() - by : simt_lane());
}
inline unsigned __ballot_sync(unsigned, bool set) {
  struct Vote {
    bool set;
    unsigned result;
  } mine{set, 0};
  kvq::simt::meet("vote", &mine, [](void* const* all) {
    unsigned word = 0;
    for (int i = 0; i < 32; ++i) word |= static_cast<unsigned>(static_cast<Vote*>(all[i])->set) << i;
    for (int i = 0; i < 32; ++i) static_cast<Vote*>(all[i])->result = word;
  });
  return mine.result;
}
inline bool __any_sync(unsigned mask, bool set) { return __ballot_sync(mask, set) != 0; }
inline bool __all_sync(unsigned mask, bool set) { return __ballot_sync(mask, set) == 0xffffffffu; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  for (std::uint32_t step = 16; step > 0; step /= 2) {
    const unsigned other = simt_shuffle("reduce", value, simt_lane() ^ step);
    if (other > value) value = other;
  }
  return value;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  for (std::uint32_t step = 16; step > 0; step /= 2) value += simt_shuffle("reduce", value, simt_lane() ^ step);
  return value;
}
inline void __syncwarp(unsigned = 0) {
  kvq::simt::meet("syncwarp", nullptr, [](void* const*) {});
}
inline void __syncthreads() { kvq::simt::block_barrier(); }
inline void __threadfence() {}

template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long by) {
  const unsigned long long before = *at;
  *at += by;
  return before;
}
inline unsigned long long atomicCAS(unsigned long long* at, unsigned long long expected, unsigned long long wanted) {
  const unsigned long long before = *at;
  if (before == expected) *at = wanted;
  return before;
}

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
template <typename To, typename From>
To simt_cast(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(std::int32_t x) { return simt_cast<float>(x); }
inline float __uint_as_float(std::uint32_t x) { return simt_cast<float>(x); }
inline std::uint32_t __float_as_uint(float x) { return simt_cast<std::uint32_t>(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
