// The simplest kernel that moves bytes, for what a launch of a given size can reach at all.
//
// Invariant: every thread reads four chunks of 16 bytes and then writes them; nothing is computed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kvq::bench {

// `bytes` (a multiple of 16) are read and as many written. `overlap`: may begin while the kernel before it still runs.
void plain_copy(const std::byte* from, std::byte* to, std::uint64_t bytes, bool overlap, cudaStream_t stream);

}  // namespace kvq::bench
