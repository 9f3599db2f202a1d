// One block of a page on its way through a CTA: where it comes from, where it goes, and the sums of what passes.
//
// Invariant: every 16-byte chunk and every word is added to its sum exactly once, at its place in the page, by the
// thread that holds it.
#pragma once

#include <cstdint>

#include "kernels/cuda/transcode_shape.h"
#include "kernels/page_sum.h"
#include "kvq/page_format.h"

namespace kvq::cuda {

struct BlockWork {
  const std::byte* from;
  std::byte* to;
  std::uint32_t from_chunk, to_chunk;  // of the page
  std::uint32_t from_bytes, to_bytes;  // to_bytes 0: only the source is summed up
  std::uint32_t job, run;
  std::uint16_t head_dim;
  Format from_format, to_format;
  Dtype dtype;
  std::uint8_t number;       // of this CTA's blocks, mod 256
  bool ends_page, ends_run;  // the last of its page (which ends a run too), of its run
};

// A thread's share.
struct Sums {
  std::uint64_t source = 0, destination = 0;
  bool refused = false;
};

struct Lane {
  std::uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::uint32_t g = lane / 4, t = lane % 4;             // fragments (page_format.h)
  std::uint32_t row = lane % 8, matrix = lane / 8;      // whose address a lane gives to ldmatrix
  std::uint32_t own = 2 * t + g / 2 % 2 + 8 * (g % 2);  // of a tile's 16 groups, the one that it computes
};

// Barrier 0 is that of all threads, the courier's too.
__device__ inline void sync_workers(std::uint32_t barrier, std::uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Pages that were written are not read again soon, as those that are read.
__device__ inline void store_chunk(const BlockWork& block, std::uint32_t at, uint4 w, Sums& sums) {
  __stcs(reinterpret_cast<uint4*>(block.to + at), w);
  add_chunk(sums.destination, block.to_chunk + at / 16, w.x, w.y, w.z, w.w);
}

__device__ inline void store_word(const BlockWork& block, std::uint32_t at, std::uint32_t w, Sums& sums) {
  __stcs(reinterpret_cast<std::uint32_t*>(block.to + at), w);
  add_word(sums.destination, block.to_chunk * 4 + at / 4, w);
}

__device__ inline uint4 chunk_at(const std::byte* shared, std::uint32_t at) {
  return *reinterpret_cast<const uint4*>(shared + at);
}

// Passes over whole blocks in shared memory; all working threads. A thread stays in one column of the page's 4 KiB rows
// wherever a block begins with a row, as all dense blocks of dense pages do, and keeps that part of its multipliers.
class Columns {
 public:
  __device__ Columns() {
    static_assert(kTranscodeThreads == 256);
    for (std::uint32_t j = 0; j < 4; ++j) column_[j] = page_sum_column(threadIdx.x) ^ page_sum_salt(j);
  }

  // Adds `bytes` that lie at `chunk` of their page, and stores them where kStore says so. kRows: whole rows for sure.
  template <bool kStore, bool kRows = false>
  __device__ __forceinline__ void pass(const std::byte* shared, std::uint32_t bytes, std::uint32_t chunk, std::byte* to,
                                       std::uint64_t& sum) const {
    if (kRows || (chunk | bytes / 16) % 256 == 0) {
      std::uint32_t row = chunk / 256;
#pragma unroll 4
      for (std::uint32_t at = threadIdx.x * 16; at < bytes; at += kTranscodeThreads * 16, ++row) {
        const uint4 w = chunk_at(shared, at);
        if (kStore) __stcs(reinterpret_cast<uint4*>(to + at), w);
        const std::uint32_t key = page_sum_row(row);
        sum += std::uint64_t{w.x} * (column_[0] ^ key);
        sum += std::uint64_t{w.y} * (column_[1] ^ key);
        sum += std::uint64_t{w.z} * (column_[2] ^ key);
        sum += std::uint64_t{w.w} * (column_[3] ^ key);
      }
    } else {
#pragma unroll 4
      for (std::uint32_t at = threadIdx.x * 16; at < bytes; at += kTranscodeThreads * 16) {
        const uint4 w = chunk_at(shared, at);
        if (kStore) __stcs(reinterpret_cast<uint4*>(to + at), w);
        add_chunk(sum, chunk + at / 16, w.x, w.y, w.z, w.w);
      }
    }
  }

  __device__ void add_source(const BlockWork& block, const std::byte* source, Sums& sums) const {
    pass<false>(source, block.from_bytes, block.from_chunk, nullptr, sums.source);
  }

  // The block as it is. Most lie at the same place in both pages, and so add the same to both sums.
  __device__ void copy(const BlockWork& block, const std::byte* source, Sums& sums) const {
    std::uint64_t sum = 0;
    pass<true>(source, block.from_bytes, block.from_chunk, block.to, sum);
    sums.source += sum;
    if (block.from_chunk != block.to_chunk) {
      sum = 0;
      pass<false>(source, block.to_bytes, block.to_chunk, nullptr, sum);
    }
    sums.destination += sum;
  }

 private:
  std::uint32_t column_[4];
};

}  // namespace kvq::cuda
