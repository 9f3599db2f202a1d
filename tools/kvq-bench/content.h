// What the bench writes into pages, and the slow attention over it.
//
// Invariant: the values are such that every quantized format holds 4-bit ones exactly (each key channel of a page and
// each token's value has its least and its greatest), so that one reference is right for dense and for INT4 pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvq_bench {

inline constexpr std::uint32_t kKvHeads = 8, kQueryHeads = 32, kHeadDim = 128;      // a layer of an 8B model
inline constexpr std::uint64_t kRowBytes = std::uint64_t{kKvHeads} * kHeadDim * 2;  // K (or V) of one token

struct Content {
  explicit Content(std::uint32_t tokens);
  std::uint32_t tokens;
  std::vector<std::uint16_t> k, v;  // fp16, [token][head][channel]
  std::vector<float> q;             // of the last token, [query head][channel]
};

// Largest difference of `out` ([query head][channel]) from attention in double precision, over some of the heads.
double worst_error(const Content& content, const std::vector<float>& out);

}  // namespace kvq_bench
