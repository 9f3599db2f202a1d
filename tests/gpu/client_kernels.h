// The few kernels that the client's GPU tests need. Each launches on the stream and returns the runtime's code.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace kvq::test {

int spin_on(CUstream_st* stream, std::uint32_t ms);
// Writes all of `count` pages again and again for this long: a different word in each round.
int scribble_on(CUstream_st* stream, std::byte* const* pages, std::uint32_t count, std::uint32_t page_bytes,
                std::uint32_t ms);
int store_on(CUstream_st* stream, const void* address, std::uint64_t value);

}  // namespace kvq::test
