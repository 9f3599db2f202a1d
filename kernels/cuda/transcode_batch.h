// What one launch of the transcoder works on, as the host writes it and the kernels read it.
//
// Invariant: plain data. The host writes layers and jobs, into the launch's parameters where they are few and else
// into staging memory that one copy brings to the device ahead of the kernel. States and the count of claimed runs are
// zero between batches: the kernel leaves them so. The last of a job's blocks writes its JobResult to host memory.
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

struct alignas(16) JobWork {
  const std::byte* source;
  std::byte* destination;
  std::uint64_t checksum;
  std::uint64_t has_checksum;
};

// Of a job's blocks so far.
struct alignas(32) JobState {
  unsigned long long source_sum, destination_sum;
  std::uint32_t blocks_done;
  std::uint32_t refused;  // not 0: a value is not finite or beyond fp16
};

struct alignas(16) JobResult {
  std::uint64_t checksum;
  std::uint64_t code;  // an Errc, written last; kPending until then
};
inline constexpr std::uint64_t kPending = ~std::uint64_t{0};

inline constexpr std::uint32_t kFewLayers = 8, kFewJobs = 16;

struct BatchWork {
  const LayerWork* layers;  // null: `few_layers` and `few_jobs`
  const JobWork* jobs;
  JobState* states;
  JobResult* results;           // mapped host memory
  std::uint32_t* claimed_runs;  // beyond the first of each CTA
  std::uint64_t blocks;
  std::uint32_t runs, run_blocks;  // a CTA takes one run at a time
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
