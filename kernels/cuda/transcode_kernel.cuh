// The loop of all transcode kernels: each CTA claims runs of consecutive blocks of the batch, streams them through a
// few buffers, and hands in its sums at the end of a run and of a page. (Claimed, since some SMs get more bandwidth
// than others.)
//
// Invariant: every block is taken once. A job's last CTA (the one that completes blocks_done) sees all sums of the
// others, so it alone compares and reports; it reads and writes nothing of other jobs.
#pragma once

#include "kernels/cuda/block_copy.cuh"
#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/transcode_batch.h"
#include "kvq/result.h"

namespace kvq::cuda {

inline constexpr std::uint32_t kMaxStages = 4;

// A place in the batch, by page, layer, head. Thread 0 walks ahead of the copies.
class BlockWalk {
 public:
  __device__ explicit BlockWalk(const BatchWork& batch) { go_to(batch, std::uint64_t{blockIdx.x} * batch.run_blocks); }

  // The next block of this CTA, if there is one; else from_bytes is 0.
  __device__ bool take(const BatchWork& batch, BlockWork& out) {
    if (left_ == 0) go_to(batch, std::uint64_t{gridDim.x + atomicAdd(batch.claimed_runs, 1u)} * batch.run_blocks);
    if (left_ == 0) {
      out.from_bytes = 0;
      return false;
    }
    const LayerWork& layer = batch.layers[layer_];
    const JobWork& job = batch.jobs[job_];
    out.from_chunk = layer.from_chunk + head_ * (layer.from_bytes / 16);
    out.to_chunk = layer.to_chunk + head_ * (layer.to_bytes / 16);
    out.from = job.source + std::uint64_t{out.from_chunk} * 16;
    out.to = job.destination + std::uint64_t{out.to_chunk} * 16;
    out.from_bytes = layer.from_bytes;
    out.to_bytes = layer.to_bytes;
    out.job = job_;
    out.head_dim = layer.head_dim;
    out.from_format = layer.from;
    out.to_format = layer.to;
    out.dtype = layer.dtype;
    out.ends_page = step(layer, batch.layer_count);
    out.ends_run = --left_ == 0;
    return true;
  }

 private:
  __device__ void go_to(const BatchWork& batch, std::uint64_t index) {
    if (index >= batch.blocks) return;
    const std::uint64_t rest = batch.blocks - index;
    left_ = rest < batch.run_blocks ? static_cast<std::uint32_t>(rest) : batch.run_blocks;
    job_ = static_cast<std::uint32_t>(index / batch.blocks_per_page);
    layer_ = 0;
    head_ = static_cast<std::uint32_t>(index % batch.blocks_per_page);
    if (batch.heads_everywhere != 0) {
      layer_ = head_ / batch.heads_everywhere;
      head_ %= batch.heads_everywhere;
      return;
    }
    while (head_ >= batch.layers[layer_].kv_heads) head_ -= batch.layers[layer_++].kv_heads;
  }

  // Whether the page ends here.
  __device__ bool step(const LayerWork& layer, std::uint32_t layer_count) {
    if (++head_ < layer.kv_heads) return false;
    head_ = 0;
    if (++layer_ < layer_count) return false;
    layer_ = 0;
    ++job_;
    return true;
  }

  std::uint32_t left_ = 0;  // in this run
  std::uint32_t job_ = 0, layer_ = 0, head_ = 0;
};

// What the padding at the end of a slot adds to the source's sum; the destination's becomes zero.
__device__ inline void end_page(const BatchWork& batch, const JobWork& job, Sums& sums) {
  for (std::uint32_t c = batch.from_end_chunk + threadIdx.x; c < batch.from_chunks; c += kTranscodeThreads) {
    const uint4 w = reinterpret_cast<const uint4*>(job.source)[c];
    add_chunk(sums.source, c, w.x, w.y, w.z, w.w);
  }
  if (batch.sum_only != 0) return;
  for (std::uint32_t c = batch.to_end_chunk + threadIdx.x; c < batch.to_chunks; c += kTranscodeThreads) {
    reinterpret_cast<uint4*>(job.destination)[c] = uint4{0, 0, 0, 0};
  }
}

__device__ inline std::uint64_t sum_of_lanes(std::uint64_t x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, static_cast<unsigned long long>(x), lanes);
  return x;
}

// Once all blocks of a job are in.
__device__ inline void report(const BatchWork& batch, std::uint32_t index) {
  __threadfence();
  JobWork& job = batch.jobs[index];
  const std::uint64_t source = atomicAdd(&job.source_sum, 0ull), destination = atomicAdd(&job.destination_sum, 0ull);
  Errc code = atomicAdd(&job.refused, 0u) != 0 ? Errc::invalid_argument : Errc::ok;
  if (job.has_checksum != 0 && job.checksum != source) code = Errc::lost_page;
  batch.results[index] = {batch.sum_only != 0 ? source : destination, static_cast<std::uint64_t>(code)};
}

// Adds this CTA's sums over `blocks` blocks to their job. All threads.
__device__ inline void hand_in(const BatchWork& batch, std::uint32_t index, std::uint32_t blocks, Sums& sums) {
  JobWork& job = batch.jobs[index];
  const std::uint64_t source = sum_of_lanes(sums.source), destination = sum_of_lanes(sums.destination);
  const bool refused = __any_sync(~0u, sums.refused);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&job.source_sum, source);
    atomicAdd(&job.destination_sum, destination);
    if (refused) atomicOr(&job.refused, 1u);
  }
  sums = Sums{};
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();  // what the barrier has brought here comes before the count
  if (atomicAdd(&job.blocks_done, blocks) + blocks == batch.blocks_per_page) report(batch, index);
}

// `Rewrite::block(block, lane, source, scratch, sums)` is called by all threads; `scratch` lies behind the buffers.
template <class Rewrite>
__global__ void __launch_bounds__(kTranscodeThreads, Rewrite::kCtas)
    rewrite_pages(const __grid_constant__ BatchWork batch) {
  constexpr bool kWarpsApart = Rewrite::kWarpsApart && KVQ_BULK_COPY;
  extern __shared__ __align__(128) std::byte buffers[];
  __shared__ BlockWork work[kMaxStages];
  __shared__ BlockWork next;  // looked up while its buffer is still in use
  __shared__ std::uint64_t arrived[kMaxStages], left[kMaxStages];
  BlockWalk walk(batch);
  bool more = true;  // thread 0's
  const auto load = [&](std::uint32_t stage) {
    if (threadIdx.x == 0) work[stage] = next;
    if (!KVQ_BULK_COPY) __syncthreads();
    if (!KVQ_BULK_COPY || threadIdx.x == 0) {
      BlockCopy::load(buffers + stage * batch.stage_bytes, work[stage].from, work[stage].from_bytes, &arrived[stage]);
    }
    if (threadIdx.x == 0 && more) more = walk.take(batch, next);
  };
  if (threadIdx.x == 0) {
    for (std::uint32_t i = 0; i < batch.stages; ++i) {
      BlockCopy::init(&arrived[i]);
      BlockCopy::init_left(&left[i], kTranscodeWarps);
    }
    BlockCopy::init_done();
    more = walk.take(batch, next);
  }
  __syncthreads();
  for (std::uint32_t i = 0; i < batch.stages; ++i) load(i);

  const Lane lane;
  const SourceSum source_sum;
  Sums sums;
  std::uint32_t stage = 0, turn = 0, blocks = 0;
  for (;;) {
    BlockCopy::wait(&arrived[stage], turn);
    const BlockWork& block = work[stage];
    if (block.from_bytes == 0) return;
    const std::byte* source = buffers + stage * batch.stage_bytes;
    source_sum.add<Rewrite::kDenseBytes>(block, source, sums);
    Rewrite::block(block, lane, source, buffers + batch.stages * batch.stage_bytes, sums);
    ++blocks;
    if (block.ends_page) end_page(batch, batch.jobs[block.job], sums);
    if (block.ends_page || block.ends_run) {
      hand_in(batch, block.job, blocks, sums);
      blocks = 0;
    }
    if constexpr (kWarpsApart) {
      __syncwarp();
      if (lane.lane == 0) BlockCopy::leave(&left[stage]);
      if (threadIdx.x == 0) {
        BlockCopy::wait(&left[stage], turn);
        load(stage);
      }
      __syncwarp();
    } else {
      __syncthreads();
      load(stage);
    }
    if (++stage == batch.stages) {
      stage = 0;
      turn ^= 1;
    }
  }
}

}  // namespace kvq::cuda
