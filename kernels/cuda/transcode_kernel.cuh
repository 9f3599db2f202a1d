// The loop of all transcode kernels: each CTA claims runs of consecutive blocks of the batch and streams them through a
// few buffers; eight warps rewrite them, and one more, the courier, claims, loads, and hands in sums. (Claimed, since
// some SMs get more bandwidth than others, and in small runs, since blocks that are read at the same time had better
// lie close together.)
//
// Invariant: every block is taken once. A CTA's last claim comes before its last hand-in, so once the sums of all runs
// are there nobody touches the batch's memory any more, though CTAs may still be: the next batch may overlap this one.
#pragma once

#include "kernels/cuda/block_copy.cuh"
#include "kernels/cuda/block_walk.cuh"
#include "kernels/cuda/hand_in.cuh"
#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/transcode_batch.h"

namespace kvq::cuda {

struct Stage {
  BlockWork block;
  WarpSums sums[kTranscodeWarps];  // where the block ends a run
  std::uint64_t arrived, left;
};
static_assert(sizeof(Stage) * kMaxStages <= kDeclaredBytes);

// What the padding at the end of a slot adds to the source's sum; the destination's becomes zero.
__device__ inline void end_page(const BatchWork& batch, const JobWork& job, Sums& sums) {
  for (std::uint32_t c = batch.from_end_chunk + threadIdx.x; c < batch.from_chunks; c += kTranscodeThreads) {
    const uint4 w = reinterpret_cast<const uint4*>(job.source)[c];
    add_chunk(sums.source, c, w.x, w.y, w.z, w.w);
  }
  if (batch.sum_only != 0) return;
  for (std::uint32_t c = batch.to_end_chunk + threadIdx.x; c < batch.to_chunks; c += kTranscodeThreads) {
    __stcs(reinterpret_cast<uint4*>(job.destination) + c, uint4{0, 0, 0, 0});
  }
}

// The courier's warp, until nothing is left.
__device__ inline void carry(const BatchWork& batch, std::byte* buffers, Stage* stages) {
  BlockWalk walk(batch);
  BlockWork next = walk.take(batch);  // lane 0's, looked up while its buffer is still in use
  const auto load = [&](std::uint32_t i) {
    Stage& stage = stages[i];
    if (threadIdx.x % 32 == 0) stage.block = next;
    __syncwarp();
    BlockCopy::load(buffers + i * batch.stage_bytes, stage.block.from, stage.block.from_bytes, &stage.arrived);
    next = walk.take(batch);
  };
  for (std::uint32_t i = 0; i < batch.stages; ++i) load(i);
  std::uint32_t turn = 0;
  for (std::uint32_t i = 0; stages[i].block.from_bytes != 0;) {
    Stage& stage = stages[i];
    BlockCopy::wait(&stage.left, turn);
    const std::uint32_t run = stage.block.run;
    const bool ends_run = stage.block.ends_run;
    const WarpSums sums = ends_run ? stage.sums[threadIdx.x % kTranscodeWarps] : WarpSums{};
    __syncwarp();
    load(i);
    if (ends_run) hand_in(batch, run, sums);
    if (++i == batch.stages) {
      i = 0;
      turn ^= 1;
    }
  }
}

// `Rewrite::block(block, lane, columns, source, scratch, sums)` is called by all working threads; `scratch` lies behind
// the buffers.
template <class Rewrite>
__global__ void __launch_bounds__(kTranscodeThreads + 32, kTranscodeCtas)
    rewrite_pages(const __grid_constant__ BatchWork batch) {
  extern __shared__ __align__(128) std::byte buffers[];
  __shared__ Stage stages[kMaxStages];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  if (threadIdx.x < batch.stages) {
    BlockCopy::init(&stages[threadIdx.x].arrived, &stages[threadIdx.x].left, kTranscodeWarps);
  }
  __syncthreads();
  if (threadIdx.x >= kTranscodeThreads) {
    carry(batch, buffers, stages);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");  // batches end in stream order
#endif
    return;
  }
  const Lane lane;
  const Columns columns;
  Sums sums;
  std::uint32_t turn = 0;
  for (std::uint32_t i = 0;;) {
    Stage& stage = stages[i];
    BlockCopy::wait(&stage.arrived, turn);
    const BlockWork& block = stage.block;
    if (block.from_bytes == 0) return;
    Rewrite::block(block, lane, columns, buffers + i * batch.stage_bytes, buffers + batch.stages * batch.stage_bytes,
                   sums);
    if (block.ends_page) end_page(batch, batch.job(block.job), sums);
    if (block.ends_run) {
      stage.sums[lane.warp] = sum_up(sums);
      sums = Sums{};
    }
    __syncwarp();
    if (lane.lane == 0) BlockCopy::leave(&stage.left);
    if (++i == batch.stages) {
      i = 0;
      turn ^= 1;
    }
  }
}

}  // namespace kvq::cuda
