// Sums of a run of blocks, from threads to the host.
//
// Invariant: what a run wrote to its page is visible to everybody before its sums are. Nothing is counted on the
// device: atomics on one place per page, and the fences between them, would cost a small batch more than its bytes do.
#pragma once

#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/transcode_batch.h"

namespace kvq::cuda {

__device__ inline std::uint64_t sum_of_lanes(std::uint64_t x, int lanes) {
  for (; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, static_cast<unsigned long long>(x), lanes);
  return x;
}

struct WarpSums {
  std::uint64_t source, destination, refused;
};

__device__ inline WarpSums sum_up(const Sums& sums) {
  return {sum_of_lanes(sums.source, 16), sum_of_lanes(sums.destination, 16),
          static_cast<std::uint64_t>(__any_sync(~0u, sums.refused))};
}

// One access of 16 bytes.
__device__ inline void store_part(PartSum* to, std::uint64_t sum, std::uint64_t tag) {
  asm volatile("{\n.reg .b128 both;\nmov.b128 both, {%1, %2};\nst.relaxed.sys.global.b128 [%0], both;\n}" ::"l"(to),
               "l"(sum), "l"(tag)
               : "memory");
}

// All lanes of the courier, lane i with the sums of warp i % 8.
__device__ inline void hand_in(const BatchWork& batch, std::uint32_t run, const WarpSums& sums) {
  static_assert(kTranscodeWarps == 8);
  const std::uint64_t source = sum_of_lanes(sums.source, 4), destination = sum_of_lanes(sums.destination, 4);
  const bool refused = __any_sync(~0u, sums.refused != 0);
  if (threadIdx.x % 32 != 0) return;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  store_part(&batch.sums[run].source, source, batch.tag + (refused ? 1 : 0));
  store_part(&batch.sums[run].destination, destination, batch.tag);
}

}  // namespace kvq::cuda
