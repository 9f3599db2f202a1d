// What one launch of the transcoder works on, as the host writes it and the kernels read it.
//
// Invariant: plain data. The host fills jobs and layers in pinned memory and one copy brings them to the device ahead
// of the kernel; only the kernel writes `sums`, and the last of a job's blocks writes its JobResult to host memory.
#pragma once

#include <cstdint>

#include "kvq/page_format.h"

namespace kvq::cuda {

struct LayerWork {
  std::uint32_t from_chunk, to_chunk;  // where head 0 starts in its page, in 16-byte chunks
  std::uint32_t from_bytes, to_bytes;  // per head; to_bytes is 0 when sources are only summed up
  std::uint16_t kv_heads;              // never 0
  std::uint16_t head_dim;
  Format from, to;
  Dtype dtype;
};

struct alignas(16) JobWork {
  const std::byte* source;
  std::byte* destination;
  std::uint64_t checksum;
  std::uint32_t has_checksum;
  // Results so far, zero at the start.
  std::uint32_t refused;  // not 0: a value is not finite or beyond fp16
  unsigned long long source_sum, destination_sum;
  std::uint32_t blocks_done;
};

struct alignas(16) JobResult {
  std::uint64_t checksum;
  std::uint64_t code;  // an Errc
};

struct BatchWork {
  const LayerWork* layers;
  JobWork* jobs;
  JobResult* results;           // mapped host memory
  std::uint32_t* claimed_runs;  // beyond the first of each CTA; zero at the start
  std::uint64_t blocks;
  std::uint32_t run_blocks;  // that a CTA takes at once
  std::uint32_t blocks_per_page, layer_count;
  std::uint32_t heads_everywhere;             // KV heads, where every layer has as many; else 0
  std::uint32_t from_end_chunk, from_chunks;  // where the last block ends, and the whole slot
  std::uint32_t to_end_chunk, to_chunks;
  std::uint32_t stage_bytes, stages;  // buffers for blocks on their way in
  std::uint32_t sum_only;
};

}  // namespace kvq::cuda
