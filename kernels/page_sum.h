// The checksum of pages in device memory: computed in any order, by any number of threads, alike on host and device.
//
// Invariant: sum of word(i) * page_sum_multiplier(i) mod 2^64 over the 32-bit words of the page. No multiplier occurs
// twice and all are odd, so parts of a page can be summed up apart and in any order, and a pass that has the words in
// registers adds them where they are.
//
// For sure: any damage inside one word, two different words that changed places, any two flipped bits. All but by
// chance: blocks zeroed, moved, swapped or left stale, another page; the chance to miss one is near 2^-60 where words
// change by much. The weakest spot: words at the corners of a rectangle (two places in a 4 KiB row, the same in another
// row) that change by +n, -n, -n, +n go unseen once in 500 times. It finds damage, not malice. Zero bytes add nothing,
// so padding that is zero need not be visited.
#pragma once

#include <cstring>

#include "kvq/types.h"

namespace kvq {

// A multiplier is three parts, combined by exclusive or, each a bijection in bits of its own (and mixed into those
// above): the word in its 16-byte chunk in bits 0 .. 2, the chunk in its 4 KiB row in bits 3 .. 10, the row in bits 11
// .. 31. So a thread that stays in its column of the rows computes two of them once. Pages end below 8 GiB.
KVQ_HD constexpr std::uint32_t page_sum_salt(std::uint32_t word) { return (2 * word + 1) * 0xc2b2'ae31u; }
static_assert(page_sum_salt(1) % 8 == 3 && page_sum_salt(3) % 8 == 7);

KVQ_HD constexpr std::uint32_t page_sum_column(std::uint32_t chunk) {
  const std::uint32_t x = chunk * (0x1e37'79b1u * 8);
  return x ^ ((x >> 7) & ~0x7ffu);
}

KVQ_HD constexpr std::uint32_t page_sum_row(std::uint32_t row) {
  const std::uint32_t x = row * (0x0015'6e9bu << 11);
  return x ^ ((x >> 9) & ~0x7ffu);
}

KVQ_HD constexpr std::uint32_t page_sum_key(std::uint32_t chunk) {
  return page_sum_column(chunk % 256) ^ page_sum_row(chunk / 256);
}

KVQ_HD constexpr std::uint32_t page_sum_multiplier(std::uint32_t word) {
  return page_sum_key(word / 4) ^ page_sum_salt(word % 4);
}

// Adds one word, or the four of a chunk, to a sum.
KVQ_HD constexpr void add_word(std::uint64_t& sum, std::uint32_t word, std::uint32_t value) {
  sum += std::uint64_t{value} * page_sum_multiplier(word);
}

KVQ_HD constexpr void add_chunk(std::uint64_t& sum, std::uint32_t chunk, std::uint32_t w0, std::uint32_t w1,
                                std::uint32_t w2, std::uint32_t w3) {
  const std::uint32_t key = page_sum_key(chunk);
  sum += std::uint64_t{w0} * (key ^ page_sum_salt(0));
  sum += std::uint64_t{w1} * (key ^ page_sum_salt(1));
  sum += std::uint64_t{w2} * (key ^ page_sum_salt(2));
  sum += std::uint64_t{w3} * (key ^ page_sum_salt(3));
}

// The sum of a page, or of `bytes` of it from `offset_bytes` on; both are multiples of 16.
inline std::uint64_t page_sum(const std::byte* page, std::uint64_t bytes, std::uint64_t offset_bytes = 0) {
  std::uint64_t sum = 0;
  const auto first = static_cast<std::uint32_t>(offset_bytes / 16);
  for (std::uint32_t i = 0; i < bytes / 16; ++i) {
    std::uint32_t w[4];
    std::memcpy(w, page + offset_bytes + std::uint64_t{i} * 16, 16);
    add_chunk(sum, first + i, w[0], w[1], w[2], w[3]);
  }
  return sum;
}

}  // namespace kvq
