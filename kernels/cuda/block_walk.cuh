// The order in which a CTA takes blocks of a batch: by page, layer, head, one run after the other.
//
// Invariant: claims of all CTAs together are as many as there are runs, since each but its first is claimed once and
// every CTA claims once in vain; the count of claimed runs is then zero again.
#pragma once

#include "kernels/cuda/page_block.cuh"
#include "kernels/cuda/transcode_batch.h"

namespace kvq::cuda {

// Lane 0 of the courier walks; the others take nothing.
class BlockWalk {
 public:
  __device__ explicit BlockWalk(const BatchWork& batch) {
    if (threadIdx.x % 32 == 0) go_to(batch, blockIdx.x);
  }

  // The next block of this CTA; from_bytes is 0 where there is none.
  __device__ BlockWork take(const BatchWork& batch) {
    BlockWork out{};
    if (threadIdx.x % 32 != 0 || over_) return out;
    if (left_ == 0) go_to(batch, gridDim.x + atomicInc(batch.claimed_runs, batch.runs - 1));
    if (over_) return out;
    const LayerWork& layer = batch.layer(layer_);
    const JobWork& job = batch.job(job_);
    const std::uint32_t in_layer = block_ - layer.first_block;
    out.from_chunk = layer.from_chunk + in_layer * (layer.from_bytes / 16);
    out.to_chunk = layer.to_chunk + in_layer * (layer.to_bytes / 16);
    out.from = job.source + std::uint64_t{out.from_chunk} * 16;
    out.to = job.destination + std::uint64_t{out.to_chunk} * 16;
    out.from_bytes = layer.from_bytes;
    out.to_bytes = layer.to_bytes;
    out.job = job_;
    out.run = run_;
    out.head_dim = layer.head_dim;
    out.from_format = layer.from;
    out.to_format = layer.to;
    out.dtype = layer.dtype;
    out.number = number_++;
    out.ends_run = --left_ == 0;
    ++block_;
    out.ends_page = block_ == batch.blocks_per_page;
    if (left_ != 0 && layer_ + 1 < batch.layer_count && block_ == batch.layer(layer_ + 1).first_block) ++layer_;
    return out;
  }

 private:
  __device__ void go_to(const BatchWork& batch, std::uint32_t run) {
    over_ = run >= batch.runs;
    if (over_) return;
    run_ = run;
    job_ = run / batch.runs_per_page;
    block_ = (run - job_ * batch.runs_per_page) * batch.run_blocks;
    left_ = min(batch.run_blocks, batch.blocks_per_page - block_);
    layer_ = 0;
    for (std::uint32_t end = batch.layer_count; end - layer_ > 1;) {
      const std::uint32_t middle = (layer_ + end) / 2;
      (batch.layer(middle).first_block <= block_ ? layer_ : end) = middle;
    }
  }

  bool over_ = false;
  std::uint8_t number_ = 0;
  std::uint32_t run_ = 0, left_ = 0;  // blocks of this run
  std::uint32_t job_ = 0, layer_ = 0, block_ = 0;
};

}  // namespace kvq::cuda
