// Sums of pages, from threads to the result that the host reads.
//
// Invariant: what a block wrote, and its sums, are visible to the GPU before its blocks are counted, and all of a page
// is before its result's code is written. Who completes the count leaves the job's state zero.
#pragma once

#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/transcode_batch.h"
#include "kvq/result.h"

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

// Once all blocks of a job are in.
__device__ inline void report(const BatchWork& batch, std::uint32_t index) {
  JobState& state = batch.states[index];
  const JobWork& job = batch.job(index);
  const std::uint64_t source = __ldcg(&state.source_sum), destination = __ldcg(&state.destination_sum);
  Errc code = __ldcg(&state.refused) != 0 ? Errc::invalid_argument : Errc::ok;
  if (job.has_checksum != 0 && job.checksum != source) code = Errc::lost_page;
  state = JobState{};
  JobResult& result = batch.results[index];
  result.checksum = batch.sum_only != 0 ? source : destination;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&result.code), "l"(static_cast<std::uint64_t>(code))
               : "memory");
}

// Adds this CTA's sums over `blocks` blocks to their job; all lanes of the courier, lane i with those of warp i % 8.
__device__ inline void hand_in(const BatchWork& batch, std::uint32_t index, std::uint32_t blocks,
                               const WarpSums& sums) {
  static_assert(kTranscodeWarps == 8);
  const std::uint64_t source = sum_of_lanes(sums.source, 4), destination = sum_of_lanes(sums.destination, 4);
  const bool refused = __any_sync(~0u, sums.refused != 0);
  if (threadIdx.x % 32 != 0) return;
  JobState& state = batch.states[index];
  atomicAdd(&state.source_sum, source);
  atomicAdd(&state.destination_sum, destination);
  if (refused) atomicOr(&state.refused, 1u);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  if (atomicAdd(&state.blocks_done, blocks) + blocks != batch.blocks_per_page) return;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  report(batch, index);
}

}  // namespace kvq::cuda
