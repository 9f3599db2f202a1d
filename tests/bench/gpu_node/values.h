// K and V that anyone can compute: each element is a function of where it belongs, alike on both devices.
//
// Invariant: integer arithmetic and exact fp32 only, so host and device agree to the last bit after rounding to fp16.
#pragma once

#include <cstdint>

#include "kvq/types.h"

struct CUstream_st;

namespace kvq::bench {

// What int4 holds without loss: each group (a channel of K over a page's 64 tokens, a token of V over the channels) has
// 16 levels an eighth apart around a midpoint that fp16 holds, the lowest and the highest among them. So whatever the
// formats of its pages are, an attention has one right result. `kind` 0: K, 1: V.
KVQ_HD inline float kv_value(std::uint32_t seed, std::uint32_t layer, std::uint32_t kind, std::uint32_t head,
                             std::uint64_t token, std::uint32_t channel) {
  std::uint64_t x = (token << 16) ^ (std::uint64_t{seed} << 48) ^ (layer << 9) ^ (kind << 8) ^ (head << 1);
  x = (x ^ channel) * 0x9e37'79b9'7f4a'7c15ULL;
  x ^= x >> 29;
  x *= 0xbf58'476d'1ce4'e5b9ULL;
  x ^= x >> 32;
  const auto place = static_cast<std::uint32_t>(kind == 0 ? (token + channel) % 64 : channel);
  const auto code = place == 0 ? 0u : place == 1 ? 15u : static_cast<std::uint32_t>(x & 15);
  const int mid = kind == 0 ? static_cast<int>(channel * 37 % 17) - 8 : static_cast<int>(token % 5) - 2;
  return static_cast<float>(mid) * 0.25f + (static_cast<float>(code) - 7.5f) * 0.125f;
}

// Fills k and v, fp16 [tokens][heads][head_dim] in device memory, for tokens [first, first + tokens) of one layer.
void fill_kv(void* k, void* v, std::uint32_t seed, std::uint32_t layer, std::uint64_t first, std::uint32_t tokens,
             std::uint32_t heads, std::uint32_t head_dim, CUstream_st* stream);

// Keeps one block of the GPU busy for about so long; part of no measurement.
void spin(double seconds, CUstream_st* stream);

}  // namespace kvq::bench
