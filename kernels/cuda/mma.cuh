// The instructions that the kernels are made of, one function each: tensor-core products, fragment loads, conversions.
//
// Invariant: fragments are those of mma.m16n8k16 with g = lane / 4, t = lane % 4. A (16 x 16, 4 words): rows g and g +
// 8, columns 2 t, 2 t + 1 and 8 more. B (16 x 8, 2 words): the same columns of row g. C (16 x 8): rows g and g + 8,
// columns 2 t and 2 t + 1. fp16 subnormals are exact operands, which is how 4-bit codes are multiplied without
// conversion.
#pragma once

#include <cstdint>

#include "kvq/types.h"

namespace kvq::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

struct Fragment {
  std::uint32_t r[4];
};

template <Dtype kType>
__device__ __forceinline__ void mma(float (&c)[4], const Fragment& a, std::uint32_t b0, std::uint32_t b1) {
  if constexpr (kType == Dtype::fp16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
  }
}

// Shared memory is addressed by 32-bit shared addresses; the loads stay behind the wait for their page.
__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint4 load_shared4(std::uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_shared2(std::uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t load_shared1(std::uint32_t at) {
  std::uint32_t v;
  asm volatile("ld.shared.b32 %0,[%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ std::uint16_t load_shared_half(std::uint32_t at) {
  std::uint16_t v;
  asm volatile("ld.shared.b16 %0,[%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared4(std::uint32_t at, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ Fragment load_matrices(std::uint32_t at) {
  Fragment f;
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
                 : "r"(at)
                 : "memory");
  }
  return f;
}

// Transposes an 8 x 8 matrix of 16-bit elements across the warp: half a C fragment becomes half a B fragment.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t a) {
  std::uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a));
  return d;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

template <Dtype kType>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  std::uint32_t d;
  if constexpr (kType == Dtype::fp16) {
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  }
  return d;
}

__device__ __forceinline__ float half_bits_to_float(std::uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(h));
  return f;
}

template <Dtype kType>
__device__ __forceinline__ float element_value(std::uint16_t bits) {
  return kType == Dtype::fp16 ? half_bits_to_float(bits) : __uint_as_float(std::uint32_t{bits} << 16);
}

template <Dtype kType>
__device__ __forceinline__ float2 unpack_pair(std::uint32_t w) {
  return {element_value<kType>(static_cast<std::uint16_t>(w)),
          element_value<kType>(static_cast<std::uint16_t>(w >> 16))};
}

// Products of two pairs of fp16.
__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace kvq::cuda
