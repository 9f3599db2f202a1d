// Vector helpers that attention and transcode share: 16-bit loads and stores that are exact on every target.
//
// Invariant: conversions round half to even and keep infinities and NaN, also where Highway 1.0.3 would truncate.
// Included once per target by a file that uses foreach_target.h; the guard toggles for that.
#if defined(KVQ_SIMD_COMMON_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVQ_SIMD_COMMON_INL_H
#undef KVQ_SIMD_COMMON_INL_H
#else
#define KVQ_SIMD_COMMON_INL_H
#endif

#include <hwy/highway.h>

#include "kernels/half.h"
#include "kvq/page_format.h"

HWY_BEFORE_NAMESPACE();
namespace kvq {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace hn = hwy::HWY_NAMESPACE;

// Asks for a stretch of memory little by little, while other work runs: the next page's block, into the second-level
// cache. Without it a page costs its arithmetic plus its memory time instead of the larger of the two.
struct Ahead {
  const std::byte* at = nullptr;
  const std::byte* end = nullptr;
  HWY_INLINE void lines(int count) {
    for (; count > 0 && at < end; --count, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

template <Dtype kType, class DF, class V16>
HWY_INLINE hn::VFromD<DF> promote16(DF df, V16 bits) {
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<std::uint16_t, DF> du16;
  if constexpr (kType == Dtype::bf16) {
    return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
  } else {
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2
    const auto wide = hn::PromoteTo(du, bits);
    const auto magnitude = hn::And(wide, hn::Set(du, 0x7fffu));
    const auto sign = hn::ShiftLeft<16>(hn::Xor(wide, magnitude));
    const auto scaled = hn::Mul(hn::BitCast(df, hn::ShiftLeft<13>(magnitude)), hn::Set(df, 0x1p112f));
    const hn::RebindToSigned<DF> di;
    const auto special = hn::RebindMask(du, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7bff)));
    const auto ones = hn::IfThenElseZero(special, hn::Set(du, 0x7f800000u));
    (void)du16;
    return hn::BitCast(df, hn::Or(hn::Or(hn::BitCast(du, scaled), ones), sign));
#else
    const hn::Rebind<hwy::float16_t, DF> df16;
    (void)du16;
    return hn::PromoteTo(df, hn::BitCast(df16, bits));
#endif
  }
}

// N elements at `p` (any alignment) as fp32.
template <Dtype kType, class DF>
HWY_INLINE hn::VFromD<DF> load16(DF df, const std::uint16_t* p) {
  return promote16<kType>(df, hn::LoadU(hn::Rebind<std::uint16_t, DF>(), p));
}

// Channels c .. c + N - 1 of `token`'s row in a dense part; c is a multiple of N and N is 4, 8 or 16.
template <Dtype kType, class DF>
HWY_INLINE hn::VFromD<DF> load_row(DF df, const std::uint16_t* part, std::uint32_t token, std::uint32_t c,
                                   std::uint32_t d) {
  const std::uint16_t* row = part + token * d;
#if HWY_MAX_BYTES >= 64
  if constexpr (hn::MaxLanes(DF()) == 16) {
    const hn::FixedTag<std::uint16_t, 8> d8;
    const hn::FixedTag<std::uint16_t, 16> d16;
    const auto low = hn::LoadU(d8, row + dense_chunk(token, c / 8, d) * 8);
    const auto high = hn::LoadU(d8, row + dense_chunk(token, c / 8 + 1, d) * 8);
    return promote16<kType>(df, hn::Combine(d16, high, low));
  }
#endif
  return load16<kType>(df, row + dense_chunk(token, c / 8, d) * 8 + c % 8);
}

template <class DF>
HWY_INLINE void store_half(DF df, hn::VFromD<DF> v, std::uint16_t* p) {
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2
  HWY_ALIGN float lane[hn::MaxLanes(DF())];
  hn::Store(v, df, lane);
  for (std::size_t i = 0; i < hn::Lanes(df); ++i) p[i] = float_to_half(lane[i]);
#else
  const hn::Rebind<hwy::float16_t, DF> df16;
  const hn::Rebind<std::uint16_t, DF> du16;
  hn::StoreU(hn::BitCast(du16, hn::DemoteTo(df16, v)), du16, p);
#endif
}

template <class DF>
HWY_INLINE void store_bf16(DF df, hn::VFromD<DF> v, std::uint16_t* p) {
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<std::uint16_t, DF> du16;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  // All values fit 16 bits, so DemoteTo does not saturate (TruncateTo of Highway 1.0.3 reorders bytes on AVX2 and up).
  const hn::RebindToSigned<DF> di;
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, hn::IfThenElse(is_nan, quiet, rounded))), du16, p);
}

// The N values at each of 4 interleaved streams -> in stream order: dst = s0[0..], s1, s2, s3. 16 words in and out.
HWY_INLINE void transpose_4x4(const std::uint32_t* src, std::uint32_t* d0, std::uint32_t* d1, std::uint32_t* d2,
                              std::uint32_t* d3) {
  const hn::FixedTag<std::uint32_t, 4> d4;
  hn::Vec<decltype(d4)> a, b, c, e;
  hn::LoadInterleaved4(d4, src, a, b, c, e);
  hn::StoreU(a, d4, d0);
  hn::StoreU(b, d4, d1);
  hn::StoreU(c, d4, d2);
  hn::StoreU(e, d4, d3);
}
#endif  // HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvq
HWY_AFTER_NAMESPACE();
#endif  // toggle
