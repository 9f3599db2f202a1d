// Hopper's instructions for many query rows: products of whole warpgroups, and the barriers between warps that bring
// pages and warps that use them.
//
// Invariant: operands lie in shared memory as rows of 128 bytes (64 elements), the 16-byte chunks of row r XORed with
// r & 7, 8 rows after one another; accumulators and weights are registers. What generic stores have written is an
// operand only after fence_writes() of the writer and a barrier.
#pragma once

#include "kernels/cuda/memory.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVQ_WARPGROUPS 1
#else
#define KVQ_WARPGROUPS 0
#endif

namespace kvq::cuda {

inline constexpr std::uint32_t kAtomBytes = 1024;  // 8 rows of 128 bytes

// Queries and keys are rows of operands whose depth is the channel, values of one whose depth is the row. An operand is
// named by the low word of its descriptor, which n bytes further on is n / 16 more. `halves` is the distance from a
// row's first 64 channels to the next 64.
__device__ __forceinline__ std::uint32_t operand_at(std::uint32_t shared, std::uint32_t halves) {
  return (shared & 0x3ffff) >> 4 | (halves >> 4) << 16;
}
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t operand) {
  return operand | std::uint64_t{kAtomBytes >> 4} << 32 | std::uint64_t{1} << 62;
}

#define KVQ_R8(c, i)                                                                                          \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define KVQ_R32(c, i) KVQ_R8(c, i), KVQ_R8(c, i + 8), KVQ_R8(c, i + 16), KVQ_R8(c, i + 24)
#define KVQ_N64                                                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31}"
#define KVQ_N128                                                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63}"

// The instruction's names of the operands' type.
#define KVQ_OF_TYPE(product)            \
  if constexpr (kType == Dtype::fp16) { \
    product("f16.f16");                 \
  } else {                              \
    product("bf16.bf16");               \
  }

// C (64 x 64) = A (64 x 16) B (64 rows) + C, or without C. A is in shared memory, laid out as B is: the warpgroup goes
// on while it waits for its turn.
template <Dtype kType>
__device__ __forceinline__ void warpgroup_mma(float (&c)[32], std::uint32_t a, std::uint32_t b, bool adds) {
#if KVQ_WARPGROUPS
#define KVQ_PRODUCT(type)                                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p,%34,0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type " " KVQ_N64 \
               ",%32,%33,p,1,1,0,0;\n}"                                                                               \
               : KVQ_R32(c, 0)                                                                                        \
               : "l"(descriptor(a)), "l"(descriptor(b)), "r"(std::uint32_t{adds}))
  KVQ_OF_TYPE(KVQ_PRODUCT)
#undef KVQ_PRODUCT
#endif
}

// The same with A (this warp's 16 rows as mma.m16n8k16 has them) in registers and B's depth in its rows.
template <Dtype kType>
__device__ __forceinline__ void warpgroup_mma(float (&c)[32], const std::uint32_t (&a)[4], std::uint32_t b) {
#if KVQ_WARPGROUPS
#define KVQ_PRODUCT(type)                                                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type " " KVQ_N64 ",{%32,%33,%34,%35},%36,1,1,1,1;" \
               : KVQ_R32(c, 0)                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)))
  KVQ_OF_TYPE(KVQ_PRODUCT)
#undef KVQ_PRODUCT
#endif
}

// And for 128 columns.
template <Dtype kType>
__device__ __forceinline__ void warpgroup_mma(float (&c)[64], const std::uint32_t (&a)[4], std::uint32_t b) {
#if KVQ_WARPGROUPS
#define KVQ_PRODUCT(type)                                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type " " KVQ_N128 ",{%64,%65,%66,%67},%68,1,1,1,1;" \
               : KVQ_R32(c, 0), KVQ_R32(c, 32)                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)))
  KVQ_OF_TYPE(KVQ_PRODUCT)
#undef KVQ_PRODUCT
#endif
}

// Before products: what the registers got since the last ones is in them.
__device__ __forceinline__ void products_begin() {
#if KVQ_WARPGROUPS
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void products_commit() {
#if KVQ_WARPGROUPS
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until at most kLeft committed groups are still on their way.
template <int kLeft>
__device__ __forceinline__ void products_wait() {
#if KVQ_WARPGROUPS
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
#endif
}
// Nothing that uses these registers moves across.
template <std::uint32_t kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (std::uint32_t i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Not to be worked out anew where it is used.
__device__ __forceinline__ void keep(std::uint32_t& x) { asm volatile("" : "+r"(x)); }

__device__ __forceinline__ void store_shared1(std::uint32_t at, std::uint32_t v) {
  asm volatile("st.shared.b32 [%0],%1;" ::"r"(at), "r"(v) : "memory");
}

// Stores of this thread come before reads by the tensor cores and the bulk copy engine.
__device__ __forceinline__ void fence_writes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

template <std::uint32_t kRegisters, bool kMore>
__device__ __forceinline__ void take_registers() {
#if KVQ_WARPGROUPS
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
#endif
}

// (a & kMask) | kMagic in one instruction.
template <std::uint32_t kMask, std::uint32_t kMagic>
__device__ __forceinline__ std::uint32_t with_magic(std::uint32_t a) {
  std::uint32_t d;
  asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(d) : "r"(a), "n"(kMask), "n"(kMagic));
  return d;
}

// Of pairs in fp16.
__device__ __forceinline__ std::uint32_t subtract_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <Dtype kType>
__device__ __forceinline__ std::uint32_t fma_pairs(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  if constexpr (kType == Dtype::fp16) {
    asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}
// Whether a * b + c is at least `limit` in one of the two places, in fp16.
__device__ __forceinline__ bool any_reaches(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t limit) {
  std::uint32_t reaches;
  asm("{\n.reg .pred p,q;\n.reg .b32 t;\nfma.rn.f16x2 t,%1,%2,%3;\nsetp.ge.f16x2 p|q,t,%4;\nor.pred p,p,q;\n"
      "selp.u32 %0,1,0,p;\n}"
      : "=r"(reaches)
      : "r"(a), "r"(b), "r"(c), "r"(limit));
  return reaches != 0;
}
// To fp16's finite range.
__device__ __forceinline__ std::uint32_t clamp_pair(std::uint32_t a) {
  asm("min.f16x2 %0,%0,%1;" : "+r"(a) : "r"(0x7bff7bffu));
  asm("max.f16x2 %0,%0,%1;" : "+r"(a) : "r"(0xfbfffbffu));
  return a;
}

// Four 8 x 8 matrices from fragments; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ void store_matrices(std::uint32_t at, const Fragment& f) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(f.r[0]),
                 "r"(f.r[1]), "r"(f.r[2]), "r"(f.r[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(f.r[0]), "r"(f.r[1]),
                 "r"(f.r[2]), "r"(f.r[3])
                 : "memory");
  }
#endif
}
__device__ __forceinline__ void store_shared_half(std::uint32_t at, std::uint16_t v) {
  asm volatile("st.shared.b16 [%0],%1;" ::"r"(at), "h"(v) : "memory");
}

// Each lane for itself: 16 bytes of which the first `bytes` are copied and the others zero, in groups.
__device__ __forceinline__ void copy16_or_zero(std::uint32_t to, std::uint64_t from, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <std::uint32_t kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Whether the phase of this parity is over.
__device__ __forceinline__ bool barrier_is_over(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t over;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}"
               : "=r"(over)
               : "r"(barrier), "r"(parity)
               : "memory");
  return over != 0;
}

// A warpgroup by itself; id 0 is the block's.
__device__ __forceinline__ void group_barrier(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether `x` holds for some thread of it.
__device__ __forceinline__ bool any_of_group(std::uint32_t id, std::uint32_t threads, bool x) {
  std::uint32_t any;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p,%3,0;\nbarrier.cta.red.or.pred.aligned p,%1,%2,p;\nselp.u32 %0,1,0,p;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(std::uint32_t{x})
      : "memory");
  return any != 0;
}

// What is the same in all lanes, so that the compiler knows it: operands are then counted on in uniform registers.
__device__ __forceinline__ std::uint32_t of_warp(std::uint32_t x) { return __shfl_sync(kAllLanes, x, 0); }

// Where a ring of `kStages` is: the stage, and the parity of its turn.
template <std::uint32_t kStages>
struct Turn {
  std::uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ Turn after() const {
    Turn next = *this;
    next.next();
    return next;
  }
};

}  // namespace kvq::cuda
