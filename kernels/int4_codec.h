// The integer rules of the quantized formats, one group at a time; the only place where they are written in scalar
// form.
//
// Invariant: value = mid + (code - top / 2) * scale with the fp16 pair (scale, mid); every operation below is one fp32
// operation, rounded half to even. The SIMD transcoder reproduces these results bit for bit.
//
//   scale = fp16((max - min) / top)          top = 15 (4 bits) or 255 (8 bits)
//   mid   = fp16(min + top / 2 * ((max - min) / top))
//   code  = clamp(round((x - mid) / scale + top / 2), 0, top)   against the rounded pair; 0 where scale is 0
//
// scale is 0 for a constant group and for one whose range is below fp16 (max - min < top * 2^-25): then value = mid,
// which is off by less than top * 2^-26. Inputs are finite and at most 65504 in magnitude (checked before: a group
// that is not stays dense), so neither scale (<= 8736) nor mid can overflow.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/half.h"

namespace kvq {

inline constexpr float kTop4 = 15.0f, kTop8 = 255.0f;

// Largest magnitude, as 15-bit pattern, that may be quantized: 65504 for fp16, 65280 for bf16 (the next is 65536).
constexpr std::uint16_t largest_bits(Dtype dtype) { return dtype == Dtype::fp16 ? 0x7bff : 0x477f; }
constexpr std::uint16_t infinity_bits(Dtype dtype) { return dtype == Dtype::fp16 ? 0x7c00 : 0x7f80; }

struct CodecPair {
  std::uint16_t scale, mid;  // fp16 bits
};

inline CodecPair codec_pair(float min, float max, float top) {
  const float scale = std::fabs(max - min) / top;  // fabs: a group of zeros of both signs has scale +0
  const float half_range = 0.5f * top * scale;     // a statement of its own: never contracted into the sum
  return {float_to_half(scale), float_to_half(min + half_range)};
}

inline std::uint32_t codec_code(float x, CodecPair pair, float top) {
  const float scale = half_to_float(pair.scale);
  if (scale == 0) return 0;
  const float steps = (x - half_to_float(pair.mid)) / scale;
  const float code = std::nearbyint(steps + 0.5f * top);
  return static_cast<std::uint32_t>(code < 0 ? 0 : code > top ? top : code);
}

inline float codec_value(std::uint32_t code, CodecPair pair, float top) {
  const float offset = (static_cast<float>(code) - 0.5f * top) * half_to_float(pair.scale);
  return half_to_float(pair.mid) + offset;
}

// A dense page gets finite values back: a group that touches the ends of fp16 may decode just beyond them.
inline std::uint16_t codec_element(float value, Dtype dtype) {
  if (dtype == Dtype::bf16) return float_to_bf16(value);
  return float_to_half(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
}

}  // namespace kvq
