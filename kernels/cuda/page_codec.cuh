// The integer rules of int4_codec.h on tensor-core fragments.
//
// Invariant: the same fp32 operations in the same order as the host's, none contracted, so codes and parameters are
// equal bit for bit. Divisions are a product with the reciprocal and one correction step, which is the correctly
// rounded quotient here: by 15 and 255 for every numerator, by an fp16 scale as transcode_simd.cc says.
//
// A fragment register holds two 16-bit elements, e = 0 and 1. Of the four registers of a tile, 0 and 1 belong to groups
// (h = 0, e), 2 and 3 to (h = 1, e), where a group is a key channel or a value token. The eight lanes with equal t =
// lane & 3 share four groups; lane 4 g + t computes the parameters of the group h = g & 1, e = g >> 1 & 1 and the
// others get them from it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/int4_codec.h"
#include "kvq/types.h"

namespace kvq::cuda {

template <Dtype kType>
struct Pair {  // of 16-bit elements in a register
  using Type = __half2;
  __device__ static float low(std::uint32_t w) { return __low2float(as_pair(w)); }
  __device__ static float high(std::uint32_t w) { return __high2float(as_pair(w)); }
  __device__ static Type as_pair(std::uint32_t w) { return *reinterpret_cast<const Type*>(&w); }
  __device__ static std::uint32_t min(std::uint32_t a, std::uint32_t b) {
    return bits(__hmin2_nan(as_pair(a), as_pair(b)));
  }
  __device__ static std::uint32_t max(std::uint32_t a, std::uint32_t b) {
    return bits(__hmax2_nan(as_pair(a), as_pair(b)));
  }
  // As codec_element: fp16 stays finite.
  __device__ static std::uint32_t round(float low, float high) {
    const Type largest = __floats2half2_rn(kLargest, kLargest);
    return bits(__hmin2(__hmax2(__floats2half2_rn(low, high), __hneg2(largest)), largest));
  }
  __device__ static std::uint32_t bits(Type x) { return *reinterpret_cast<const std::uint32_t*>(&x); }
  static constexpr float kLargest = 65504.0f;
};

template <>
struct Pair<Dtype::bf16> {
  using Type = __nv_bfloat162;
  __device__ static float low(std::uint32_t w) { return __uint_as_float(w << 16); }
  __device__ static float high(std::uint32_t w) { return __uint_as_float(w & 0xffff'0000u); }
  __device__ static Type as_pair(std::uint32_t w) { return *reinterpret_cast<const Type*>(&w); }
  __device__ static std::uint32_t min(std::uint32_t a, std::uint32_t b) {
    return bits(__hmin2_nan(as_pair(a), as_pair(b)));
  }
  __device__ static std::uint32_t max(std::uint32_t a, std::uint32_t b) {
    return bits(__hmax2_nan(as_pair(a), as_pair(b)));
  }
  __device__ static std::uint32_t round(float low, float high) { return bits(__floats2bfloat162_rn(low, high)); }
  __device__ static std::uint32_t bits(Type x) { return *reinterpret_cast<const std::uint32_t*>(&x); }
  static constexpr float kLargest = 65280.0f;
};

// Smallest and largest elements of a lane's four groups; NaN wins.
template <Dtype kType>
struct Range {
  std::uint32_t min[2], max[2];  // by h

  __device__ explicit Range(const std::uint32_t (&r)[4]) {
    for (int h = 0; h < 2; ++h) {
      min[h] = Pair<kType>::min(r[2 * h], r[2 * h + 1]);
      max[h] = Pair<kType>::max(r[2 * h], r[2 * h + 1]);
    }
  }
  __device__ void include(const std::uint32_t (&r)[4]) {
    for (int h = 0; h < 2; ++h) {
      min[h] = Pair<kType>::min(min[h], Pair<kType>::min(r[2 * h], r[2 * h + 1]));
      max[h] = Pair<kType>::max(max[h], Pair<kType>::max(r[2 * h], r[2 * h + 1]));
    }
  }
  // Over all lanes that share the groups: the ends of the group that is this lane's to compute.
  __device__ void join(std::uint32_t g, float& low, float& high) const {
    const bool h = g % 2 != 0, e = g / 2 % 2 != 0;
    std::uint32_t a = Pair<kType>::min(h ? min[1] : min[0], __shfl_xor_sync(~0u, h ? min[0] : min[1], 4));
    std::uint32_t b = Pair<kType>::max(h ? max[1] : max[0], __shfl_xor_sync(~0u, h ? max[0] : max[1], 4));
#pragma unroll
    for (int lanes = 8; lanes < 32; lanes *= 2) {
      a = Pair<kType>::min(a, __shfl_xor_sync(~0u, a, lanes));
      b = Pair<kType>::max(b, __shfl_xor_sync(~0u, b, lanes));
    }
    low = e ? Pair<kType>::high(a) : Pair<kType>::low(a);
    high = e ? Pair<kType>::high(b) : Pair<kType>::low(b);
  }
};

// x / top, correctly rounded; x is 0 or far from the ends of fp32, or so small that its scale is 0 anyway.
__device__ inline float divide_by_top(float x, float top) {
  const float inverse = 1.0f / top, guess = __fmul_rn(x, inverse);
  return __fmaf_rn(__fmaf_rn(-guess, top, x), inverse, guess);
}

// 1 / s for an fp16 number, correctly rounded: its 11 bits keep the quotient off every midpoint. 0 for 0.
__device__ inline float invert_scale(float s) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(s));
  const float inverse = __fmaf_rn(guess, __fmaf_rn(-s, guess, 1.0f), guess);
  return s == 0 ? 0.0f : inverse;
}

// The parameters of one group, in the lane that computes them.
struct Group {
  std::uint32_t bits;  // scale, and mid in the high half
  float inverse;       // 1 / scale, or 0 for a constant group
  bool refused;        // a value is not finite or beyond fp16
  bool plain;          // codes of 4 bits need neither a clamp nor an exact division (code_bits)

  // `kept`: a channel that is kept in 16 bits has no parameters.
  __device__ Group(float low, float high, float largest, float top, bool kept) {
    refused = !(low >= -largest && high <= largest);
    const float range_scale = divide_by_top(fabsf(__fsub_rn(high, low)), top);
    const float range_mid = __fadd_rn(low, __fmul_rn(0.5f * top, range_scale));
    bits = kept ? 0 : Pair<Dtype::fp16>::bits(__floats2half2_rn(range_scale, range_mid));
    const float scale = Pair<Dtype::fp16>::low(bits), mid = Pair<Dtype::fp16>::high(bits);
    inverse = invert_scale(scale);
    const float steps = __fmul_rn(mid, inverse);
    const float off_integer = fabsf(steps - __fsub_rn(__fadd_rn(steps, kRound), kRound));
    plain = scale >= 0x1p-14f && fabsf(steps) <= 512.0f && off_integer >= 0.0041f;
  }

  // A word of the block: scales (lanes with e = 0) or mids (e = 1) of both groups of this lane's h.
  __device__ std::uint32_t parameters(std::uint32_t g) const {
    const std::uint32_t other = __shfl_xor_sync(~0u, bits, 8);
    return g / 2 % 2 == 0 ? __byte_perm(bits, other, 0x5410) : __byte_perm(other, bits, 0x7632);
  }

  static constexpr float kRound = 12582912.0f;  // 1.5 x 2^23: adding it rounds half to even, into the low bits
};

// The parameters of a lane's four groups (index 2 h + e), ready for use.
template <bool kPlain>
struct Groups {
  float mid[4], inverse[4];
  float correction[4], offset[4];  // unless plain: what is left of 1 / scale; 0 for a constant group, else top / 2

  __device__ Groups(const Group& own, std::uint32_t t, float top) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t lane = t + 4 * (i / 2 + 2 * (i % 2));
      const std::uint32_t bits = __shfl_sync(~0u, own.bits, lane);
      mid[i] = Pair<Dtype::fp16>::high(bits);
      inverse[i] = __shfl_sync(~0u, own.inverse, lane);
      if constexpr (!kPlain) {
        correction[i] = __fmul_rn(__fmaf_rn(-Pair<Dtype::fp16>::low(bits), inverse[i], 1.0f), inverse[i]);
        offset[i] = inverse[i] == 0 ? 0.0f : 0.5f * top;
      }
    }
  }
};

// The code of x in the low bits of a word.
//
// The exact way: quotient, sum and rounding as int4_codec.h has them. 48 bits of the reciprocal give the correctly
// rounded quotient: 24 bits over 11 stay 2^-36 away from the middle between two fp32 numbers, this is off by 2^-47
// before rounding.
//
// The plain way gives the same codes with three operations less. Let q be the true quotient (x - mid) / scale, |q| < 8.
// The exact way errs by at most 2^-20 before it rounds to an integer, the plain way by 0.75 x 2^-19, so they can differ
// only if q is closer than 2^-19 to an integer n (where q + 7.5 is a tie) without being n; for q = n both meet the tie
// exactly, since 16 added leaves the plain sum no bits below 2^-19. If |x| >= scale / 256, then x, mid and scale are
// multiples of some 2^k >= scale x 2^-19, and so is x - mid - n scale: q is n or far enough. If |x| is smaller, q is
// far from every integer because mid / scale is (0.0041, less 1/256 for x and 2^-14 for the error of that test). A mid
// below scale / 256 fails the test at 0. No code leaves 0 .. 15: the rounding of mid moves q by a quarter at most
// (|mid| <= 512 scale), that of scale by less.
template <bool kPlain>
__device__ inline std::uint32_t code_bits(const Groups<kPlain>& g, int i, float x, float top) {
  const float a = __fsub_rn(x, g.mid[i]);
  if constexpr (kPlain) {
    return __float_as_uint(__fadd_rn(__fmaf_rn(a, g.inverse[i], 23.5f), Group::kRound - 16.0f));
  } else {
    const float steps = __fmaf_rn(a, g.inverse[i], __fmul_rn(a, g.correction[i]));
    const float code = fminf(fmaxf(__fadd_rn(steps, g.offset[i]), 0.0f), top);
    return __float_as_uint(__fadd_rn(code, Group::kRound));
  }
}

// Both codes of register `j`: e = 0 in the low half, e = 1 in the high half.
template <Dtype kType, bool kPlain>
__device__ inline std::uint32_t code_pair(const Groups<kPlain>& g, int j, std::uint32_t elements, float top) {
  const int h = j >> 1;
  return __byte_perm(code_bits(g, 2 * h, Pair<kType>::low(elements), top),
                     code_bits(g, 2 * h + 1, Pair<kType>::high(elements), top), 0x5410);
}

// The word of a tile's four registers, nibble j for register j.
template <Dtype kType, bool kPlain>
__device__ inline std::uint32_t code_word(const Groups<kPlain>& g, const std::uint32_t (&r)[4]) {
  std::uint32_t w = code_pair<kType>(g, 0, r[0], kTop4);
#pragma unroll
  for (int j = 1; j < 4; ++j) w += code_pair<kType>(g, j, r[j], kTop4) << (4 * j);
  return w;
}

// 8-bit codes: high and low nibbles in a word each.
template <Dtype kType>
__device__ inline void code_words(const Groups<false>& g, const std::uint32_t (&r)[4], std::uint32_t& high,
                                  std::uint32_t& low) {
  std::uint32_t bytes[2];  // of registers 2 h and 2 h + 1 in each half
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::uint32_t even = code_pair<kType>(g, 2 * h, r[2 * h], kTop8),
                        odd = code_pair<kType>(g, 2 * h + 1, r[2 * h + 1], kTop8);
    bytes[h] = __byte_perm(even, odd, 0x6240);
  }
  // Nibbles 0 and 2 of each half, side by side.
  const auto pack = [](std::uint32_t nibbles) { return (nibbles | nibbles >> 4) & 0x00ff'00ffu; };
  low = pack(bytes[0] & 0x0f0f'0f0fu) + (pack(bytes[1] & 0x0f0f'0f0fu) << 8);
  high = pack(bytes[0] >> 4 & 0x0f0f'0f0fu) + (pack(bytes[1] >> 4 & 0x0f0f'0f0fu) << 8);
}

// The value of a code, as codec_value: the product is exact (9 bits by 11), so one rounding is what two are there.
__device__ inline float decode(float code_from_center, float scale, float mid) {
  return __fmaf_rn(code_from_center, scale, mid);
}

}  // namespace kvq::cuda
