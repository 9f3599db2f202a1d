// The CUDA kernels that servers run: append, attend, merge on pages in device memory. The twins of host_kernels.h.
//
// Invariant: a call validates what the host can know, launches on the caller's stream, and returns: it never
// synchronizes, allocates, or reads device memory, so it may be captured into a graph and replayed with other lengths,
// tables and slots in the same arrays. Grids and workspace depend on the device and on the model alone, never on lengths.
//
// The pointers in AppendCall and AttentionCall are device pointers here, except `model`, which is host memory and only read
// during the call; `pages.entries` is the device's copy of the directory, `pages.arena` a multiple of 128. What only the
// device can see (a page id outside the directory, a page that is lost or in host memory) goes to the fault word: the first
// one stays there, the rows that needed the page become NaN, and an append leaves the token out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host_kernels.h"

struct CUstream_st;

namespace kvq::cuda {

using Stream = CUstream_st*;  // cudaStream_t and CUstream; null: the legacy default stream

// What a kernel could not do, in one 64-bit word: | Errc 8 | layer 8 | sequence or token, cut to 16 bits | page id 32 |; 0: nothing.
KVQ_HD constexpr std::uint64_t pack_fault(Errc code, std::uint32_t layer, std::uint32_t index, std::uint32_t page) {
  return (std::uint64_t{static_cast<std::uint8_t>(code)} << 56) | (std::uint64_t{layer & 0xff} << 48) |
         (std::uint64_t{index & 0xffff} << 32) | page;
}

// What a call needs beside its arguments.
struct Launch {
  Stream stream = nullptr;
  std::uint64_t* fault = nullptr;  // one aligned word that the device can write (mapped host memory); required
  // Page numbers of slots and block tables are aliases: page = aliases[alias], the null page beyond alias_count. Null: page ids.
  const std::int32_t* aliases = nullptr;
  std::uint32_t alias_count = 0;
  void* workspace = nullptr;  // attend only: workspace_bytes() of them, 256-byte aligned; one call at a time may use it
  std::size_t workspace_bytes = 0;
  std::uint32_t max_query_tokens = 0;  // attend only: a hint for speed, never for correctness; 0: unknown
};

// The current device: 0 when this build has code for it, else why not (the message names both).
Result<void> check_device();

// Workspace of any attend call of this model on the current device. Errors: system (no device), wrong_layout.
Result<std::size_t> workspace_bytes(const ModelView& model, std::uint32_t query_heads);

// K and V of a step's new tokens, all sequences, in one launch. Errors: invalid_argument, wrong_layout, system (the launch).
Result<void> append(const AppendCall& call, const Launch& launch);

// Attention over mixed formats: decode, several query tokens, prefill chunks; `threads` is ignored, `lengths`, `query_starts`,
// `block_tables`, `alibi` and `sinks` are device arrays. Numeric bounds: kernels/cuda/attend_kernel.cuh, prefill_kernel.cuh.
// Errors: invalid_argument, wrong_layout, system (the launch).
Result<void> attend(const AttentionCall& call, const Launch& launch);

// As the host's merge_states, on device pointers.
Result<void> merge_states(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint64_t rows,
                          std::uint32_t head_dim, Stream stream);

}  // namespace kvq::cuda
