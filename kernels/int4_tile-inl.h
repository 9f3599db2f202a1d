// Products of 4-bit codes with 16-bit integers, in the fragment order of page_format.h.
//
// Invariant: integer arithmetic is exact. A factor vector x (q * scale over channels, or p * scale over tokens) becomes
// x'_i = round(x_i * 32767 / max|x|), so the only error of a product is |x_i - f x'_i| <= f / 2, f = max|x| / 32767.
//
// One 32-bit word holds the same (token, channel) pairs for both operands' roles: rows of the product (tokens for K,
// channels for V) are 16 i + g + 8 (j & 1), the summed index is 16 kt + 2 t + e + 8 (j >> 1). So a masked word is a
// pair (e = 0, 1) of 16-bit integers, one instruction multiplies it with the pair (x'_(2t), x'_(2t+1)) and sums; lanes
// of different t are added at the end. Sums: 256 channels * 15 * 32767, times 16 for the odd j that stay in place, <
// 2^31.
#if defined(KVQ_INT4_TILE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVQ_INT4_TILE_INL_H
#undef KVQ_INT4_TILE_INL_H
#else
#define KVQ_INT4_TILE_INL_H
#endif

#include <cmath>
#include <limits>

#include "kernels/simd_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvq {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

using WordTag = hn::CappedTag<std::uint32_t, 16>;
using IntTag = hn::RebindToSigned<WordTag>;
using PairTag = hn::Repartition<std::int16_t, IntTag>;
using FloatTag = hn::RebindToFloat<WordTag>;

inline constexpr std::uint32_t kOperandTile = 2 * 32;  // int16 of one kt: [h][t][4 copies][e]

// acc + a0 * b0 + a1 * b1 for each 32-bit lane's pair of 16-bit integers.
HWY_INLINE hn::Vec<IntTag> dot_pairs(hn::Vec<IntTag> acc, hn::Vec<PairTag> a, hn::Vec<PairTag> b) {
#if HWY_TARGET == HWY_AVX3_DL
  // VNNI is part of this target's CPU check, but not of the compiler options that Highway 1.0.3 sets, so no intrinsic.
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "vm"(b.raw));
  return acc;
#else
  const IntTag d;
  auto other = hn::Zero(d);
  const auto sum = hn::ReorderWidenMulAccumulate(d, a, b, acc, other);
#if HWY_ARCH_X86
  return sum;
#else
  return hn::RearrangeToOddPlusEven(sum, other);
#endif
#endif
}

// Scales of `count` items in natural order, as fp32 (order of the block: page_format.h).
HWY_INLINE void load_scales(const std::uint16_t* src, std::uint32_t count, float* out) {
  HWY_ALIGN std::uint32_t pairs[16];
  const hn::CappedTag<float, 8> df;
  for (std::uint32_t kt = 0; kt + 1 < count / 16; kt += 2) {
    std::uint32_t words[16];
    __builtin_memcpy(words, src + kt * 16, 64);
    transpose_4x4(words, pairs, pairs + 4, pairs + 8, pairs + 12);
    const auto* natural = reinterpret_cast<const std::uint16_t*>(pairs);
    for (std::uint32_t i = 0; i < 32; i += hn::Lanes(df)) {
      hn::StoreU(load16<Dtype::fp16>(df, natural + i), df, out + kt * 16 + i);
    }
  }
  if (count / 16 % 2 != 0) {
    for (std::uint32_t x = count - 16; x < count; ++x) out[x] = half_to_float(src[scale_index(x, count)]);
  }
}

HWY_INLINE void load_mids(const std::uint16_t* src, std::uint32_t count, float* out) {
  HWY_ALIGN std::uint32_t pairs[16];
  const hn::CappedTag<float, 8> df;
  for (std::uint32_t kt = 0; kt + 1 < count / 16; kt += 2) {
    std::uint32_t words[16];
    __builtin_memcpy(words, src + kt * 16, 64);
    transpose_4x4(words, pairs, pairs + 8, pairs + 4, pairs + 12);
    const auto* natural = reinterpret_cast<const std::uint16_t*>(pairs);
    for (std::uint32_t i = 0; i < 32; i += hn::Lanes(df)) {
      hn::StoreU(load16<Dtype::fp16>(df, natural + i), df, out + kt * 16 + i);
    }
  }
  if (count / 16 % 2 != 0) {
    for (std::uint32_t x = count - 16; x < count; ++x) out[x] = half_to_float(src[mid_index(x, count)]);
  }
}

struct Factor {
  float unit;        // x ~ unit * x'; NaN when x holds a value that is not finite
  std::int32_t sum;  // of all x'
};

// [h][t][e] -> [h][t][4 copies][e]: each pair of 16-bit integers fills a 16-byte block.
HWY_INLINE void expand_pairs(const std::int16_t* pairs, std::uint32_t count, std::int16_t* operand) {
  alignas(64) static constexpr std::uint8_t kCopies[64] = {
      0, 1, 2,  3,  0,  1,  2,  3,  0,  1,  2,  3,  0,  1,  2,  3,  4,  5,  6,  7, 4,  5,
      6, 7, 4,  5,  6,  7,  4,  5,  6,  7,  8,  9,  10, 11, 8,  9,  10, 11, 8,  9, 10, 11,
      8, 9, 10, 11, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15};
  const PairTag dp;
  const hn::Repartition<std::uint8_t, PairTag> db;
  for (std::uint32_t half = 0; half < count / 8; ++half) {
    const auto block = hn::BitCast(db, hn::LoadDup128(dp, pairs + half * 8));
    for (std::uint32_t u = 0; u < 64; u += hn::MaxLanes(db)) {
      const auto spread = hn::TableLookupBytes(block, hn::Load(db, kCopies + u));
      hn::Store(hn::BitCast(dp, spread), dp, operand + half * 32 + u / 2);
    }
  }
}

// x = a * b (element-wise over `count`) as the integer operand [kt][h][t][4 copies][e].
HWY_INLINE Factor make_operand(const float* a, const float* b, std::uint32_t count, bool finite,
                               std::int16_t* operand) {
  const FloatTag df;
  const IntTag di;
  const hn::Rebind<std::int16_t, FloatTag> d16;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(df));
  auto largest = hn::Zero(df);
  for (std::uint32_t i = 0; i < count; i += lanes) {
    largest = hn::Max(largest, hn::Abs(hn::Mul(hn::LoadU(df, a + i), hn::LoadU(df, b + i))));
  }
  const float max = hn::GetLane(hn::MaxOfLanes(df, largest));
  const float up = finite && max > 1e-33f ? 32767.0f / max : 0.0f;  // below, 32767 / max would overflow
  HWY_ALIGN std::int16_t rounded[kMaxHeadDim];
  auto sum = hn::Zero(di);
  const auto scale = hn::Set(df, up);
  for (std::uint32_t i = 0; i < count; i += lanes) {
    const auto x = hn::Mul(hn::Mul(hn::LoadU(df, a + i), hn::LoadU(df, b + i)), scale);
    const auto whole = hn::NearestInt(x);
    sum = hn::Add(sum, whole);
    hn::StoreU(hn::DemoteTo(d16, whole), d16, rounded + i);
  }
  expand_pairs(rounded, count, operand);
  const float unit = finite ? (up == 0 ? 0.0f : max / 32767.0f) : std::numeric_limits<float>::quiet_NaN();
  return {unit, hn::GetLane(hn::SumOfLanes(di, sum))};
}

// Adds the lanes of different t: [t][4] -> [4].
HWY_INLINE void store_lane_sums(hn::Vec<IntTag> v, std::int32_t* out) {
  const hn::FixedTag<std::int32_t, 4> d4;
#if HWY_MAX_BYTES >= 64
  const hn::FixedTag<std::int32_t, 8> d8;
  const auto eight = hn::Add(hn::LowerHalf(d8, v), hn::UpperHalf(d8, v));
  hn::Store(hn::Add(hn::LowerHalf(d4, eight), hn::UpperHalf(d4, eight)), d4, out);
#elif HWY_MAX_BYTES >= 32
  hn::Store(hn::Add(hn::LowerHalf(d4, v), hn::UpperHalf(d4, v)), d4, out);
#else
  hn::Store(v, d4, out);
#endif
}

// out[r][8 (j & 1) + g][i] = sum over kt, t, e, h of code * operand, for 64 product rows 16 i + g + 8 (j & 1).
template <int kRows>
HWY_INLINE void code_products(const std::uint32_t* words, std::uint32_t tile_words, std::uint32_t tiles,
                              const std::int16_t* const* operand, std::int32_t* const* out, Ahead& ahead) {
  const WordTag dw;
  const IntTag di;
  const PairTag dp;
  constexpr std::uint32_t lanes = hn::MaxLanes(dw);
  const auto low = hn::Set(dw, 0x000f000fu), high = hn::Set(dw, 0x00f000f0u);
  for (std::uint32_t g = 0; g < 8; ++g) {
    hn::Vec<IntTag> even[kRows], odd[kRows];
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = hn::Zero(di);
    ahead.lines(8);
    for (std::uint32_t kt = 0; kt < tiles; ++kt) {
      for (std::uint32_t u = 0; u < 16; u += lanes) {
        const auto w = hn::LoadU(dw, words + kt * tile_words + g * 16 + u);
        const auto w8 = hn::ShiftRight<8>(w);
        const auto n0 = hn::BitCast(dp, hn::And(w, low)), n1 = hn::BitCast(dp, hn::And(w, high));
        const auto n2 = hn::BitCast(dp, hn::And(w8, low)), n3 = hn::BitCast(dp, hn::And(w8, high));
        for (int r = 0; r < kRows; ++r) {
          const std::int16_t* b = operand[r] + kt * kOperandTile + 2 * u;
          const auto b0 = hn::Load(dp, b), b1 = hn::Load(dp, b + 32);
          even[r] = dot_pairs(dot_pairs(even[r], n0, b0), n2, b1);
          odd[r] = dot_pairs(dot_pairs(odd[r], n1, b0), n3, b1);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      store_lane_sums(even[r], out[r] + g * 4);
      store_lane_sums(hn::ShiftRight<4>(odd[r]), out[r] + 32 + g * 4);
    }
  }
}

// The 64 sums of code_products in natural order 16 i + (8 (j & 1) + g), four vectors at a time: visit(row index, sums).
template <class Visit>
HWY_INLINE void for_natural(const std::int32_t* sums, Visit&& visit) {
  const IntTag di;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(di));
  for (std::uint32_t x = 0; x < 16; x += lanes) {
    hn::Vec<IntTag> v0, v1, v2, v3;
    hn::LoadInterleaved4(di, sums + x * 4, v0, v1, v2, v3);
    visit(x, v0);
    visit(16 + x, v1);
    visit(32 + x, v2);
    visit(48 + x, v3);
  }
}

// A last group of V tiles that is not full, widened to four words per lane: [kt][lane][4], zeros where there is no
// tile.
HWY_INLINE void widen_group(const std::uint32_t* words, std::uint32_t tile_words, std::uint32_t width,
                            std::uint32_t* out) {
  for (std::uint32_t kt = 0; kt < 4; ++kt) {
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      for (std::uint32_t i = 0; i < 4; ++i) {
        out[kt * 128 + lane * 4 + i] = i < width ? words[kt * tile_words + lane * width + i] : 0;
      }
    }
  }
}
#endif  // HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvq
HWY_AFTER_NAMESPACE();
#endif  // toggle
