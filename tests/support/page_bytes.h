// What the bytes of a page must be, in whatever format it is now: a function of its tokens and their positions alone.
//
// Invariant: exact. Formats are made from dense pages only, and bit for bit as kernels/host_kernels.h says, so a page
// that differs in one byte from the transcoded image of its tokens is wrong.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/support/tiny_model.h"

namespace kvq::test {

// How often pages were found in each format.
struct Formats {
  std::uint64_t dense = 0, quantized = 0;
};

// Compares the pages of a sequence, of which `tokens` are written, in one step; throws std::runtime_error for a wrong
// byte and for a page that is neither open nor sealed. Null pages are passed over. Not for sequences that were cut
// inside a quantized page: those hold rounded values.
Formats check_pages(TinyModel& tiny, const std::vector<std::int32_t>& block_table,
                    const std::vector<std::uint32_t>& tokens);

}  // namespace kvq::test
