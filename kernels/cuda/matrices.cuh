// Tiles of a dense block in shared memory, to and from the registers of tensor-core fragments.
//
// Invariant: what a load reads, the store of the same name writes. A lane gives the address of row `lane.row` of matrix
// `lane.matrix`.
#pragma once

#include "kernels/cuda/block_copy.cuh"
#include "kernels/cuda/page_block.cuh"

namespace kvq::cuda {

__device__ inline void load_matrices(std::uint32_t address, std::uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void load_matrices_transposed(std::uint32_t address, std::uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void store_matrices(std::uint32_t address, const std::uint32_t (&r)[4]) {
#if KVQ_BULK_COPY
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#else
  const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (std::uint32_t j = 0; j < 4; ++j) {
    const std::uint32_t row = __shfl_sync(~0u, address, 8 * j + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(r[j]) : "memory");
  }
#endif
}

__device__ inline void store_matrices_transposed(std::uint32_t address, const std::uint32_t (&r)[4]) {
#if KVQ_BULK_COPY
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
  std::uint32_t turned[4];
#pragma unroll
  for (std::uint32_t j = 0; j < 4; ++j) {
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned[j]) : "r"(r[j]));
  }
  store_matrices(address, turned);
#endif
}

// Row of K tile kt, tokens 16 mt .. 16 mt + 15: register j holds channels 16 kt + 2 t + 8 (j >> 1) + (0, 1) of token
// 16 mt + g + 8 (j & 1).
__device__ __forceinline__ std::uint32_t key_matrix(const Lane& lane, std::uint32_t keys, std::uint32_t d,
                                                    std::uint32_t kt, std::uint32_t mt) {
  return keys + (16 * mt + lane.row + 8 * (lane.matrix % 2)) * 2 * d +
         dense_chunk(lane.row, 2 * kt + lane.matrix / 2, d) * 16;
}

// Row of V tile (kt, ct): transposed, register j holds tokens 16 kt + 2 t + 8 (j >> 1) + (0, 1) of channel
// 16 ct + g + 8 (j & 1).
__device__ __forceinline__ std::uint32_t value_matrix(const Lane& lane, std::uint32_t values, std::uint32_t d,
                                                      std::uint32_t kt, std::uint32_t ct) {
  return values + (16 * kt + lane.row + 8 * (lane.matrix / 2)) * 2 * d +
         dense_chunk(lane.row, 2 * ct + lane.matrix % 2, d) * 16;
}

__device__ __forceinline__ void load_key_tile(const Lane& lane, std::uint32_t keys, std::uint32_t d, std::uint32_t kt,
                                              std::uint32_t (&r)[4][4]) {
#pragma unroll
  for (std::uint32_t mt = 0; mt < 4; ++mt) load_matrices(key_matrix(lane, keys, d, kt, mt), r[mt]);
}

__device__ __forceinline__ void load_value_tile(const Lane& lane, std::uint32_t values, std::uint32_t d,
                                                std::uint32_t kt, std::uint32_t ct, std::uint32_t (&r)[4]) {
  load_matrices_transposed(value_matrix(lane, values, d, kt, ct), r);
}

}  // namespace kvq::cuda
