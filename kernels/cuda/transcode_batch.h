// What one launch of the transcoder works on, as the host writes it and the kernels read it.
//
// Invariant: plain data. The host writes layers and jobs, into the launch's parameters where they are few and else
// into staging memory that one copy brings to the device ahead of the kernel. The count of claimed runs is zero between
// batches: the kernel leaves it so. Sums go to host memory run by run, and the host adds them up.
#pragma once

#include <cstdint>

#include "kvq/page_format.h"

namespace kvq::cuda {

// Layers that follow one another and are alike: blocks of one size, one after the other in both pages.
struct LayerWork {
  std::uint32_t first_block;           // of the page
  std::uint32_t from_chunk, to_chunk;  // where that starts in its page, in 16-byte chunks
  std::uint32_t from_bytes, to_bytes;  // per block; to_bytes is 0 when sources are only summed up
  std::uint16_t head_dim;
  Format from, to;
  Dtype dtype;
};

struct JobWork {
  const std::byte* source;
  std::byte* destination;
};

// What one run of blocks has added to a sum of its page. Both words arrive together.
struct alignas(16) PartSum {
  std::uint64_t sum;
  std::uint64_t
      tag;  // that of the batch once the run is done; of the source also plus 1 if a value cannot be quantized
};
struct RunSums {
  PartSum source, destination;
};

inline constexpr std::uint32_t kFewLayers = 8, kFewJobs = 16;

struct BatchWork {
  const LayerWork* layers;  // null: `few_layers` and `few_jobs`
  const JobWork* jobs;
  RunSums* sums;                                  // of all runs, in mapped host memory
  std::uint64_t tag;                              // of this batch, even
  std::uint32_t* claimed_runs;                    // beyond the first of each CTA
  std::uint32_t runs, runs_per_page, run_blocks;  // a CTA takes one run at a time; the last of a page may be shorter
  std::uint32_t blocks_per_page, layer_count;
  std::uint32_t from_end_chunk, from_chunks;  // where the last block ends, and the whole slot
  std::uint32_t to_end_chunk, to_chunks;
  std::uint32_t stage_bytes, stages;  // buffers for blocks on their way in
  std::uint32_t sum_only;
  LayerWork few_layers[kFewLayers];
  JobWork few_jobs[kFewJobs];

  KVQ_HD const LayerWork& layer(std::uint32_t i) const { return (layers != nullptr ? layers : few_layers)[i]; }
  KVQ_HD const JobWork& job(std::uint32_t i) const { return (layers != nullptr ? jobs : few_jobs)[i]; }
};

}  // namespace kvq::cuda
