// One block's rewrite, between transcode.cc (checks, pages) and transcode_simd.cc (arithmetic).
//
// Invariant: codes and parameters equal those of int4_codec.h bit for bit, on every target.
#pragma once

#include "kernels/host_kernels.h"

namespace kvq {

// The largest magnitude pattern (sign bit off) among `count` 16-bit elements; count is a multiple of 64.
std::uint16_t largest_pattern(const std::uint16_t* elements, std::size_t count);

// Both need pointers aligned to 16 bytes. quantize: every element of `dense` was found to be within largest_bits().
void quantize(Format format, std::uint32_t d, Dtype dtype, const std::byte* dense, std::byte* block);
void dequantize(Format format, std::uint32_t d, Dtype dtype, const std::byte* block, std::byte* dense);

}  // namespace kvq
