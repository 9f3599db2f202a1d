// Products with the 16-bit rows of a dense block, read through its chunk swizzle.
//
// Invariant: only tokens in [begin, end) are read by the value product, so what lies past a sequence's length
// (unwritten memory, NaN) never reaches a result; the key product may read all 64 rows, its caller masks.
#if defined(KVQ_DENSE_TILE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVQ_DENSE_TILE_INL_H
#undef KVQ_DENSE_TILE_INL_H
#else
#define KVQ_DENSE_TILE_INL_H
#endif

#include "kernels/simd_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvq {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

using RowTag = hn::CappedTag<float, 16>;

// The four vectors' lane sums, as one 4-lane vector.
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> sum_each(hn::Vec<RowTag> a, hn::Vec<RowTag> b, hn::Vec<RowTag> c,
                                                    hn::Vec<RowTag> e) {
  const RowTag df;
  const hn::RepartitionToWide<RowTag> dd;
  const auto ab = hn::Add(hn::InterleaveLower(df, a, b), hn::InterleaveUpper(df, a, b));  // a02 b02 a13 b13 per block
  const auto ce = hn::Add(hn::InterleaveLower(df, c, e), hn::InterleaveUpper(df, c, e));
  const auto low = hn::BitCast(df, hn::InterleaveLower(dd, hn::BitCast(dd, ab), hn::BitCast(dd, ce)));
  const auto high = hn::BitCast(df, hn::InterleaveUpper(dd, hn::BitCast(dd, ab), hn::BitCast(dd, ce)));
  const auto sums = hn::Add(low, high);
#if HWY_MAX_BYTES >= 32
  const hn::FixedTag<float, 4> d4;
#endif
#if HWY_MAX_BYTES >= 64
  const hn::FixedTag<float, 8> d8;
  const auto eight = hn::Add(hn::LowerHalf(d8, sums), hn::UpperHalf(d8, sums));
  return hn::Add(hn::LowerHalf(d4, eight), hn::UpperHalf(d4, eight));
#elif HWY_MAX_BYTES >= 32
  return hn::Add(hn::LowerHalf(d4, sums), hn::UpperHalf(d4, sums));
#else
  return sums;
#endif
}

// scores[r][token] = q[r] . K[token], for the 64 tokens of a block.
template <int kRows, Dtype kType>
HWY_INLINE void dense_scores(const std::uint16_t* k, std::uint32_t d, const float* const* q, float* const* scores,
                             Ahead& ahead) {
  const RowTag df;
  const hn::FixedTag<float, 4> d4;
  for (std::uint32_t token = 0; token < kPageTokens; token += 4) {
    hn::Vec<RowTag> acc[kRows][4];
    for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = hn::Zero(df);
    ahead.lines(20);
    for (std::uint32_t c = 0; c < d; c += hn::MaxLanes(df)) {
      const auto k0 = load_row<kType>(df, k, token, c, d), k1 = load_row<kType>(df, k, token + 1, c, d);
      const auto k2 = load_row<kType>(df, k, token + 2, c, d), k3 = load_row<kType>(df, k, token + 3, c, d);
      for (int r = 0; r < kRows; ++r) {
        const auto x = hn::LoadU(df, q[r] + c);
        acc[r][0] = hn::MulAdd(x, k0, acc[r][0]);
        acc[r][1] = hn::MulAdd(x, k1, acc[r][1]);
        acc[r][2] = hn::MulAdd(x, k2, acc[r][2]);
        acc[r][3] = hn::MulAdd(x, k3, acc[r][3]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      hn::StoreU(sum_each(acc[r][0], acc[r][1], acc[r][2], acc[r][3]), d4, scores[r] + token);
    }
  }
}

// out[r] = out[r] * keep[r] + sum over tokens of p[r][token] * V[token].
template <int kRows, Dtype kType>
HWY_INLINE void dense_values(const std::uint16_t* v, std::uint32_t d, std::uint32_t begin, std::uint32_t end,
                             const float* const* p, const float* keep, float* const* out, Ahead& ahead) {
  const RowTag df;
  constexpr std::uint32_t lanes = hn::MaxLanes(df);
  constexpr std::uint32_t kVectors = 4;
  for (std::uint32_t c = 0; c < d; c += kVectors * lanes) {
    const std::uint32_t vectors = (d - c) / lanes < kVectors ? (d - c) / lanes : kVectors;
    hn::Vec<RowTag> acc[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (std::uint32_t i = 0; i < kVectors; ++i) acc[r][i] = hn::Zero(df);
    }
    if (vectors == kVectors) {
      for (std::uint32_t token = begin; token < end; ++token) {
        hn::Vec<RowTag> x[kVectors];
        ahead.lines(2);
        for (std::uint32_t i = 0; i < kVectors; ++i) x[i] = load_row<kType>(df, v, token, c + i * lanes, d);
        for (int r = 0; r < kRows; ++r) {
          const auto weight = hn::Set(df, p[r][token]);
          for (std::uint32_t i = 0; i < kVectors; ++i) acc[r][i] = hn::MulAdd(weight, x[i], acc[r][i]);
        }
      }
    } else {
      for (std::uint32_t i = 0; i < vectors; ++i) {
        for (std::uint32_t token = begin; token < end; ++token) {
          const auto x = load_row<kType>(df, v, token, c + i * lanes, d);
          for (int r = 0; r < kRows; ++r) acc[r][i] = hn::MulAdd(hn::Set(df, p[r][token]), x, acc[r][i]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (std::uint32_t i = 0; i < vectors; ++i) {
        float* o = out[r] + c + i * lanes;
        hn::StoreU(hn::MulAdd(hn::LoadU(df, o), hn::Set(df, keep[r]), acc[r][i]), df, o);
      }
    }
  }
}
#endif  // HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvq
HWY_AFTER_NAMESPACE();
#endif  // toggle
