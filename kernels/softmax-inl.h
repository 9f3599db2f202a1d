// Online softmax over one page's 64 scores of one row.
//
// Invariant: (maximum, sum, output) stands for exp(maximum) * (sum, output) over the keys seen so far. The empty state
// is maximum = -inf, sum = 0, output = 0; a true -inf is the only mark of "nothing" (no finite sentinel). NaN scores of
// visible keys make sum NaN and stay.
#if defined(KVQ_SOFTMAX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVQ_SOFTMAX_INL_H
#undef KVQ_SOFTMAX_INL_H
#else
#define KVQ_SOFTMAX_INL_H
#endif

#include <hwy/contrib/math/math-inl.h>

#include <cmath>
#include <limits>

#include "kernels/simd_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvq {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

struct RowState {
  float maximum, sum;
};

// What turns raw products into logits for one row and page.
struct RowRule {
  float scale, softcap, slope;
  std::int32_t distance;    // query position minus the page's first position
  std::int32_t begin, end;  // visible tokens of the page, within [0, 64]
};

struct RowWeights {
  float keep;   // factor for what was accumulated before
  bool finite;  // false when a weight is NaN
};

// scores -> weights exp(logit - new maximum), zeros where masked. Not called for a row that sees nothing of the page.
HWY_INLINE RowWeights soften(float* scores, const RowRule& rule, RowState& state) {
  const hn::CappedTag<float, 16> df;
  constexpr std::uint32_t lanes = hn::MaxLanes(df);
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  auto top = hn::Set(df, state.maximum);
  for (std::uint32_t i = 0; i < kPageTokens; i += lanes) {
    const auto token = hn::Iota(df, static_cast<float>(i));
    auto s = hn::Mul(hn::LoadU(df, scores + i), hn::Set(df, rule.scale));
    if (rule.softcap > 0) {
      const auto bent = hn::Tanh(df, hn::Mul(s, hn::Set(df, 1.0f / rule.softcap)));
      s = hn::IfThenElse(hn::IsNaN(s), s, hn::Mul(hn::Set(df, rule.softcap), bent));
    }
    if (rule.slope != 0) {
      const auto distance = hn::Abs(hn::Sub(hn::Set(df, static_cast<float>(rule.distance)), token));
      s = hn::NegMulAdd(hn::Set(df, rule.slope), distance, s);
    }
    const auto visible = hn::And(hn::Ge(token, hn::Set(df, static_cast<float>(rule.begin))),
                                 hn::Lt(token, hn::Set(df, static_cast<float>(rule.end))));
    s = hn::IfThenElse(visible, s, hn::Set(df, kNothing));
    top = hn::Max(top, s);
    hn::StoreU(s, df, scores + i);
  }
  const float maximum = hn::GetLane(hn::MaxOfLanes(df, top));
  if (maximum == kNothing) {
    // Nothing visible has a finite logit: keep the state; a NaN that Max dropped is still in the scores.
    auto sum = hn::Zero(df);
    for (std::uint32_t i = 0; i < kPageTokens; i += lanes) {
      const auto s = hn::LoadU(df, scores + i);
      const auto weight = hn::IfThenElseZero(hn::IsNaN(s), s);
      sum = hn::Add(sum, weight);
      hn::StoreU(weight, df, scores + i);
    }
    state.sum += hn::GetLane(hn::SumOfLanes(df, sum));
    return {1.0f, !std::isnan(state.sum)};
  }
  auto sum = hn::Zero(df);
  for (std::uint32_t i = 0; i < kPageTokens; i += lanes) {
    const auto s = hn::Sub(hn::LoadU(df, scores + i), hn::Set(df, maximum));
    const auto weight = hn::IfThenElse(hn::IsNaN(s), s, hn::Exp(df, s));
    sum = hn::Add(sum, weight);
    hn::StoreU(weight, df, scores + i);
  }
  const float keep = state.maximum == kNothing ? 0.0f : std::exp(state.maximum - maximum);
  const float added = hn::GetLane(hn::SumOfLanes(df, sum));
  // NaN before must survive a keep of 0.
  state.sum = state.sum * keep + added;
  state.maximum = maximum;
  return {keep, !std::isnan(added)};
}
#endif  // HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvq
HWY_AFTER_NAMESPACE();
#endif  // toggle
