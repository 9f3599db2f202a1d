// 16-bit floats in plain integer arithmetic: exact to fp32, round half to even from it.
//
// Invariant: independent of the CPU's features and rounding mode, so the codec, the oracle and the SIMD code for
// machines without conversion instructions agree bit for bit.
#pragma once

#include <bit>
#include <cstdint>

#include "kvq/types.h"

namespace kvq {

constexpr float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t{h & 0x8000u} << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f80'0000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

constexpr std::uint16_t float_to_half(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f), magnitude = bits & 0x7fff'ffffu;
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f80'0000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477f'f000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x3300'0001u) return sign;             // 2^-25 and below round to zero
  const std::uint32_t exponent = magnitude >> 23;
  // Below 2^-14 the result is a multiple of 2^-24: shift the full mantissa further.
  const std::uint32_t shift = exponent < 113 ? 126 - exponent : 13;
  const std::uint32_t full = exponent < 113 ? (magnitude & 0x7f'ffffu) | 0x80'0000u : magnitude - (112u << 23);
  const std::uint32_t rounded = full + ((1u << (shift - 1)) - 1) + ((full >> shift) & 1);
  return static_cast<std::uint16_t>(sign | (rounded >> shift));
}

constexpr float bf16_to_float(std::uint16_t b) { return std::bit_cast<float>(std::uint32_t{b} << 16); }

constexpr std::uint16_t float_to_bf16(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

constexpr float element_to_float(std::uint16_t bits, Dtype dtype) {
  return dtype == Dtype::fp16 ? half_to_float(bits) : bf16_to_float(bits);
}

}  // namespace kvq
