// How a CTA of the transcode kernels is made up, as host and device have to know.
//
// Invariant: the kernels assert what they need of this.
#pragma once

#include <cstdint>

#include "kvq/page_format.h"

namespace kvq::cuda {

// Those that work on blocks; the courier's warp comes behind them.
inline constexpr std::uint32_t kTranscodeThreads = 256, kTranscodeWarps = kTranscodeThreads / 32;
inline constexpr std::uint32_t kTranscodeCtas = 3;     // on a multiprocessor
inline constexpr std::uint32_t kMaxStages = 4;         // buffers for blocks on their way in
inline constexpr std::uint32_t kDeclaredBytes = 2048;  // of shared memory, by the kernels themselves at most
inline constexpr std::uint32_t kKeyScratchBytes = 8 * kMaxHeadDim + 64;  // for the choice of kept channels

}  // namespace kvq::cuda
