// Appends of a step's tokens beside plain copies of the same bytes.
//
// Invariant: a step is one launch for each layer, in a graph; the copy has as many launches of as many bytes.
#pragma once

#include <cuda_runtime_api.h>

#include "tests/bench/rows.h"

namespace kvq::bench {

// `arena` has room for `pages` dense pages of Llama-3-8B's shape, `source` for 512 MiB.
void append_rows(Rows& rows, std::byte* arena, std::uint32_t pages, std::byte* source, cudaStream_t stream);

}  // namespace kvq::bench
