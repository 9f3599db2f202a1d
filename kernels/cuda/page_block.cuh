// One block of a page on its way through a CTA: where it comes from, where it goes, and the sums of what passes.
//
// Invariant: every 16-byte chunk and every word is added to its sum exactly once, at its place in the page, by the
// thread that holds it.
#pragma once

#include <cstdint>

#include "kernels/page_sum.h"
#include "kvq/page_format.h"

namespace kvq::cuda {

inline constexpr std::uint32_t kTranscodeThreads = 256, kTranscodeWarps = kTranscodeThreads / 32;

struct BlockWork {
  const std::byte* from;
  std::byte* to;
  std::uint32_t from_chunk, to_chunk;  // of the page
  std::uint32_t from_bytes, to_bytes;  // to_bytes 0: only the source is summed up
  std::uint32_t job;
  std::uint16_t head_dim;
  Format from_format, to_format;
  Dtype dtype;
  bool ends_page, ends_run;  // the last of its page, of the CTA's run
};

// A thread's share.
struct Sums {
  std::uint64_t source = 0, destination = 0;
  bool refused = false;
};

struct Lane {
  std::uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::uint32_t g = lane / 4, t = lane % 4;         // fragments (page_format.h)
  std::uint32_t row = lane % 8, matrix = lane / 8;  // whose address a lane gives to ldmatrix
};

__device__ inline void store_chunk(const BlockWork& block, std::uint32_t at, uint4 w, Sums& sums) {
  *reinterpret_cast<uint4*>(block.to + at) = w;
  add_chunk(sums.destination, block.to_chunk + at / 16, w.x, w.y, w.z, w.w);
}

__device__ inline void store_word(const BlockWork& block, std::uint32_t at, std::uint32_t w, Sums& sums) {
  *reinterpret_cast<std::uint32_t*>(block.to + at) = w;
  add_word(sums.destination, block.to_chunk * 4 + at / 4, w);
}

__device__ inline uint4 chunk_at(const std::byte* shared, std::uint32_t at) {
  return *reinterpret_cast<const uint4*>(shared + at);
}

// Sums up sources; all threads. A thread stays in one column of the page's 4 KiB rows wherever a block begins with a
// row, as all blocks of dense pages do, and keeps that part of its multipliers.
class SourceSum {
 public:
  __device__ SourceSum() {
    static_assert(kTranscodeThreads == 256);
    for (std::uint32_t j = 0; j < 4; ++j) column_[j] = page_sum_column(threadIdx.x) ^ page_sum_salt(j);
  }

  // kDenseBytes: the size of all blocks that are not copied, where it is known.
  template <std::uint32_t kDenseBytes>
  __device__ void add(const BlockWork& block, const std::byte* source, Sums& sums) const {
    if (kDenseBytes != 0 && block.from_bytes == kDenseBytes) {
      add_rows(kDenseBytes, block, source, sums);
    } else if ((block.from_chunk | block.from_bytes / 16) % 256 == 0) {
      add_rows(block.from_bytes, block, source, sums);
    } else {
#pragma unroll 4
      for (std::uint32_t at = threadIdx.x * 16; at < block.from_bytes; at += kTranscodeThreads * 16) {
        const uint4 w = chunk_at(source, at);
        add_chunk(sums.source, block.from_chunk + at / 16, w.x, w.y, w.z, w.w);
      }
    }
  }

 private:
  __device__ __forceinline__ void add_rows(std::uint32_t bytes, const BlockWork& block, const std::byte* source,
                                           Sums& sums) const {
    std::uint32_t row = block.from_chunk / 256;
#pragma unroll 4
    for (std::uint32_t at = 0; at < bytes; at += kTranscodeThreads * 16, ++row) {
      const uint4 w = chunk_at(source, at + threadIdx.x * 16);
      const std::uint32_t key = page_sum_row(row);
      sums.source += std::uint64_t{w.x} * (column_[0] ^ key);
      sums.source += std::uint64_t{w.y} * (column_[1] ^ key);
      sums.source += std::uint64_t{w.z} * (column_[2] ^ key);
      sums.source += std::uint64_t{w.w} * (column_[3] ^ key);
    }
  }

  std::uint32_t column_[4];
};

// Writes a whole block that lies ready in shared memory; all threads.
__device__ inline void write_block(const BlockWork& block, const std::byte* ready, Sums& sums) {
#pragma unroll 4
  for (std::uint32_t at = threadIdx.x * 16; at < block.to_bytes; at += kTranscodeThreads * 16) {
    store_chunk(block, at, chunk_at(ready, at), sums);
  }
}

}  // namespace kvq::cuda
