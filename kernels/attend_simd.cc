// Fused attention over pages of mixed formats: one template over rows, the formats as traits, one copy per target.
//
// Invariant: a row's result depends on its own visible keys only, in page order, so batch and tile neighbours never
// change it beyond which pages are visited.
//
// Numeric bound that tests/kernels/attend_test.cc checks against the double-precision oracle on the same bytes, per
// element of an fp32 output (16-bit outputs add half a unit in the last place):
//   |error| <= (exp(2 E) - 1 + W) * max|V|,   lse: |error| <= E + 2^-16 + 2^-21 |lse|
//   E, one logit: scale * (sqrt(d) * c * max_i|q_i s_i| / 32767 + 2^-22 * sum_i|q_i| (|k_i| + c s_i)) + 2^-22 |logit|
//     c = 0 in dense pages, 7.5 with 4-bit and 127.5 with 8-bit codes. The first term is six standard deviations of the
//     rounded integer operands (int4_tile-inl.h; never more than sqrt(d) / 2 times that), the others are fp32 sums.
//   W, the weights: 2^-13 where a row sees quantized pages (the same rounding of p * scale), else 2^-20.
// Exp and Tanh of Highway are within a few units in the last place, which the 2^-22 |logit| and W cover.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attend_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>

#include "kernels/attend_item.h"
#include "kernels/dense_tile-inl.h"
#include "kernels/int4_tile-inl.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvq {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR
// Never chosen: supported_targets() leaves it out, and attend refuses a machine that has nothing better.
void attend_item_target(const AttendItem&) { KVQ_ASSERT(!"no vector unit"); }
void finish_item_target(const AttendItem&, const float*) { KVQ_ASSERT(!"no vector unit"); }
#else

// One worker's scratch; grows to nothing, reused by every item of the thread.
struct AttendScratch {
  alignas(64) float queries[kItemRows * kMaxHeadDim];  // [head][row][d]
  alignas(64) float scores[kRowTile][kPageTokens];
  alignas(64) float state[kItemRows * (16 + kMaxHeadDim)];  // [head]: maxima, sums, outputs
  alignas(64) float k_scale[kMaxHeadDim], k_mid[kMaxHeadDim], v_scale[kPageTokens], v_mid[kPageTokens];
  alignas(64) std::uint32_t last_group[4 * 128];
  alignas(64) std::int16_t operand[4][kMaxHeadDim / 16 * kOperandTile];
  alignas(64) std::int32_t sums[2][4][64];
  bool finite[kItemRows];  // queries, [head][row]
  const float* q;          // of the head at work
  const bool* q_finite;
  Ahead ahead;
};

struct Rows {  // a block of up to four rows of the tile
  AttendScratch* s;
  std::uint32_t kv_head;
  std::uint32_t first;
  std::uint32_t d;
  float* maxima;
  float* sums;
  float* outputs;  // [rows][d]
};

HWY_INLINE float dot(const float* a, const float* b, std::uint32_t count) {
  const FloatTag df;
  auto sum = hn::Zero(df);
  for (std::uint32_t i = 0; i < count; i += hn::MaxLanes(df)) {
    sum = hn::MulAdd(hn::LoadU(df, a + i), hn::LoadU(df, b + i), sum);
  }
  return hn::GetLane(hn::SumOfLanes(df, sum));
}

void load_queries(const AttendItem& item, std::uint32_t d, AttendScratch& s) {
  const AttentionCall& call = *item.call;
  const hn::CappedTag<float, 8> df;
  for (std::uint32_t i = 0; i < item.heads * item.rows; ++i) {
    const std::uint32_t row = item.first_row + i % item.rows;
    const std::int64_t token = std::int64_t{call.query_starts[item.sequence]} + row / item.group;
    const std::int64_t head = std::int64_t{item.kv_head + i / item.rows} * item.group + row % item.group;
    const std::int64_t at = token * call.q_token_stride + head * call.q_head_stride;
    auto worst = hn::Zero(df);
    for (std::uint32_t c = 0; c < d; c += hn::MaxLanes(df)) {
      const auto* bits = static_cast<const std::uint16_t*>(call.q) + at + c;
      const auto x = call.q_type == Real::fp32   ? hn::LoadU(df, static_cast<const float*>(call.q) + at + c)
                     : call.q_type == Real::fp16 ? load16<Dtype::fp16>(df, bits)
                                                 : load16<Dtype::bf16>(df, bits);
      worst = hn::Add(worst, hn::Sub(x, x));  // zero, or NaN where x is not finite
      hn::StoreU(x, df, s.queries + i * d + c);
    }
    s.finite[i] = hn::GetLane(hn::SumOfLanes(df, worst)) == 0;
  }
}

// scores of 64 tokens from codes: unit * (sum - top/2 sum x') + q . mid, then the kept channels.
template <int kRows>
void quantized_scores(const Rows& rows, const std::byte* block, Format format, Dtype dtype) {
  AttendScratch& s = *rows.s;
  const std::uint32_t d = rows.d, tiles = d / 16;
  const BlockOffsets at = block_offsets(format, d);
  const bool wide = format == Format::k8v4;
  const std::int16_t* operand[kRows];
  std::int32_t* sums[kRows];
  std::int32_t* low_sums[kRows];
  Factor factor[kRows];
  for (int r = 0; r < kRows; ++r) {
    const std::uint32_t row = rows.first + r;
    factor[r] = make_operand(s.q + row * d, s.k_scale, d, s.q_finite[row], s.operand[r]);
    operand[r] = s.operand[r];
    sums[r] = s.sums[0][r];
    low_sums[r] = s.sums[1][r];
  }
  code_products<kRows>(reinterpret_cast<const std::uint32_t*>(block + at.k), 128, tiles, operand, sums, s.ahead);
  if (wide)
    code_products<kRows>(reinterpret_cast<const std::uint32_t*>(block + at.k_low), 128, tiles, operand, low_sums,
                         s.ahead);
  const IntTag di;
  const FloatTag df;
  for (int r = 0; r < kRows; ++r) {
    if (wide) {
      for (std::uint32_t i = 0; i < 64; i += hn::MaxLanes(di)) {
        const auto high = hn::ShiftLeft<4>(hn::Load(di, sums[r] + i));
        hn::Store(hn::Add(high, hn::Load(di, low_sums[r] + i)), di, sums[r] + i);
      }
    }
    // The integer part of top/2 is taken off exactly, before the sums lose bits in fp32.
    const auto whole = hn::Set(di, (wide ? 127 : 7) * factor[r].sum);
    const float rest =
        dot(s.q + (rows.first + r) * d, s.k_mid, d) - 0.5f * factor[r].unit * static_cast<float>(factor[r].sum);
    const auto unit = hn::Set(df, factor[r].unit), base = hn::Set(df, rest);
    float* scores = s.scores[rows.first + r];
    for_natural(sums[r], [&](std::uint32_t x, hn::Vec<IntTag> v) HWY_ATTR {
      hn::StoreU(hn::MulAdd(hn::ConvertTo(df, hn::Sub(v, whole)), unit, base), df, scores + x);
    });
  }
  const auto* list = reinterpret_cast<const std::uint16_t*>(block + at.channels);
  const auto* kept = reinterpret_cast<const std::uint16_t*>(block + at.kept);
  for (std::uint32_t n = 0; n < kept_channels(format); ++n) {
    if (list[n] >= d) continue;  // unused
    for (std::uint32_t t = 0; t < kPageTokens; t += hn::MaxLanes(df)) {
      const auto x = dtype == Dtype::fp16 ? load16<Dtype::fp16>(df, kept + n * kPageTokens + t)
                                          : load16<Dtype::bf16>(df, kept + n * kPageTokens + t);
      for (int r = 0; r < kRows; ++r) {
        float* scores = s.scores[rows.first + r] + t;
        hn::StoreU(hn::MulAdd(hn::Set(df, s.q[(rows.first + r) * d + list[n]]), x, hn::LoadU(df, scores)), df, scores);
      }
    }
  }
}

template <int kRows>
void quantized_values(const Rows& rows, const std::byte* block, Format format, const RowWeights* weights) {
  AttendScratch& s = *rows.s;
  const std::uint32_t d = rows.d, tiles = d / 16;
  const auto* words = reinterpret_cast<const std::uint32_t*>(block + block_offsets(format, d).v);
  const std::int16_t* operand[kRows];
  std::int32_t* sums[kRows];
  Factor factor[kRows];
  float base[kRows];
  for (int r = 0; r < kRows; ++r) {
    const float* p = s.scores[rows.first + r];
    factor[r] = make_operand(p, s.v_scale, kPageTokens, weights[r].finite, s.operand[r]);
    operand[r] = s.operand[r];
    sums[r] = s.sums[0][r];
    base[r] = dot(p, s.v_mid, kPageTokens) - 0.5f * factor[r].unit * static_cast<float>(factor[r].sum);
  }
  const IntTag di;
  const FloatTag df;
  for (std::uint32_t group = 0; group * 4 < tiles; ++group) {
    const bool full = tiles - group * 4 >= 4;
    if (full) {
      code_products<kRows>(words + group * 128, tiles * 32, 4, operand, sums, s.ahead);
    } else {
      code_products<kRows>(s.last_group, 128, 4, operand, sums, s.ahead);
    }
    for (int r = 0; r < kRows; ++r) {
      const auto whole = hn::Set(di, 7 * factor[r].sum);
      const auto unit = hn::Set(df, factor[r].unit), offset = hn::Set(df, base[r]), keep = hn::Set(df, weights[r].keep);
      float* out = rows.outputs + (rows.first + r) * d + group * 64;
      for_natural(sums[r], [&](std::uint32_t x, hn::Vec<IntTag> v) HWY_ATTR {
        if (group * 64 + x >= d) return;
        const auto page = hn::MulAdd(hn::ConvertTo(df, hn::Sub(v, whole)), unit, offset);
        hn::StoreU(hn::MulAdd(hn::LoadU(df, out + x), keep, page), df, out + x);
      });
    }
  }
}

template <int kRows>
void dense_rows(const Rows& rows, const std::byte* block, Dtype dtype, bool keys, std::uint32_t begin,
                std::uint32_t end, const RowWeights* weights) {
  const float* in[kRows];
  float* out[kRows];
  float keep[kRows];
  for (int r = 0; r < kRows; ++r) {
    const std::uint32_t row = rows.first + r;
    in[r] = keys ? rows.s->q + row * rows.d : rows.s->scores[row];
    out[r] = keys ? rows.s->scores[row] : rows.outputs + row * rows.d;
    keep[r] = keys ? 0 : weights[r].keep;
  }
  Ahead& ahead = rows.s->ahead;
  const auto* part = reinterpret_cast<const std::uint16_t*>(block) + (keys ? 0 : kPageTokens * rows.d);
  if (keys && dtype == Dtype::fp16) dense_scores<kRows, Dtype::fp16>(part, rows.d, in, out, ahead);
  if (keys && dtype == Dtype::bf16) dense_scores<kRows, Dtype::bf16>(part, rows.d, in, out, ahead);
  if (!keys && dtype == Dtype::fp16) dense_values<kRows, Dtype::fp16>(part, rows.d, begin, end, in, keep, out, ahead);
  if (!keys && dtype == Dtype::bf16) dense_values<kRows, Dtype::bf16>(part, rows.d, begin, end, in, keep, out, ahead);
}

// One block of rows against one page.
template <int kRows>
HWY_NOINLINE void rows_page(const AttendItem& item, const Rows& rows, std::uint32_t page) {
  const AttentionCall& call = *item.call;
  AttendScratch& s = *rows.s;
  const std::int64_t length = call.lengths[item.sequence], start = std::int64_t{page} * kPageTokens;
  RowRule rule[kRows];
  std::int32_t begin = kPageTokens, end = 0;
  for (int r = 0; r < kRows; ++r) {
    const std::uint32_t row = item.first_row + rows.first + r;
    const std::uint32_t head = rows.kv_head * item.group + row % item.group;
    const std::int64_t position = query_position(call, item.sequence, row / item.group);
    const Visible keys = visible_keys(call, position, length);
    const std::int64_t from = keys.begin - start, to = keys.end - start;
    rule[r] = {item.scale,
               call.softcap,
               call.alibi != nullptr ? call.alibi[head] : 0.0f,
               static_cast<std::int32_t>(position - start),
               static_cast<std::int32_t>(from < 0 ? 0 : from),
               static_cast<std::int32_t>(to > kPageTokens ? kPageTokens : to)};
    if (rule[r].begin >= rule[r].end) continue;
    begin = rule[r].begin < begin ? rule[r].begin : begin;
    end = rule[r].end > end ? rule[r].end : end;
  }
  if (begin >= end) return;
  const ResolvedPage& place = item.pages[page - item.first_page];
  const Dtype dtype = call.model.geometry->layer[call.layer].dtype;
  const std::byte* block =
      place.base == nullptr ? nullptr : place.base + place.layer_offset + rows.kv_head * place.head_bytes;
  if (block == nullptr) {
    for (int r = 0; r < kRows; ++r) std::memset(s.scores[rows.first + r], 0, sizeof s.scores[0]);
  } else if (place.format == Format::dense) {
    dense_rows<kRows>(rows, block, dtype, true, 0, kPageTokens, nullptr);
  } else {
    quantized_scores<kRows>(rows, block, place.format, dtype);
  }
  RowWeights weights[kRows];
  for (int r = 0; r < kRows; ++r) {
    const std::uint32_t row = rows.first + r;
    weights[r] = {1.0f, true};
    if (rule[r].begin >= rule[r].end) {
      std::memset(s.scores[row], 0, sizeof s.scores[0]);
      continue;
    }
    RowState state{rows.maxima[row], rows.sums[row]};
    weights[r] = soften(s.scores[row], rule[r], state);
    rows.maxima[row] = state.maximum;
    rows.sums[row] = state.sum;
  }
  if (block == nullptr) {
    for (int r = 0; r < kRows; ++r) {
      for (std::uint32_t c = 0; c < rows.d; ++c) rows.outputs[(rows.first + r) * rows.d + c] *= weights[r].keep;
    }
  } else if (place.format == Format::dense) {
    dense_rows<kRows>(rows, block, dtype, false, begin, end, weights);
  } else {
    quantized_values<kRows>(rows, block, place.format, weights);
  }
}

// Parameters of a quantized block that all rows of the tile share.
void load_parameters(const AttendItem& item, std::uint32_t page, std::uint32_t kv_head, std::uint32_t d,
                     AttendScratch& s) {
  const ResolvedPage& place = item.pages[page - item.first_page];
  if (place.base == nullptr || place.format == Format::dense) return;
  const std::byte* block = place.base + place.layer_offset + kv_head * place.head_bytes;
  const BlockOffsets at = block_offsets(place.format, d);
  load_scales(reinterpret_cast<const std::uint16_t*>(block + at.k_scale), d, s.k_scale);
  load_mids(reinterpret_cast<const std::uint16_t*>(block + at.k_mid), d, s.k_mid);
  load_scales(reinterpret_cast<const std::uint16_t*>(block + at.v_scale), kPageTokens, s.v_scale);
  load_mids(reinterpret_cast<const std::uint16_t*>(block + at.v_mid), kPageTokens, s.v_mid);
  const std::uint32_t tiles = d / 16, group = tiles / 4;
  if (tiles % 4 != 0) {
    widen_group(reinterpret_cast<const std::uint32_t*>(block + at.v) + group * 128, tiles * 32, tiles % 4,
                s.last_group);
  }
}

void finish_row(const AttendItem& item, std::uint32_t kv_head, std::uint32_t r, std::uint32_t d, const float* states) {
  const AttentionCall& call = *item.call;
  const hn::CappedTag<float, 8> df;
  const std::uint32_t row = item.first_row + r, head = kv_head * item.group + row % item.group;
  const std::int64_t token = std::int64_t{call.query_starts[item.sequence]} + row / item.group;
  float maximum = states[r], sum = states[item.rows + r], keep = 1;
  const float* output = states + state_outputs(item) + std::size_t{r} * d;
  if (call.sinks != nullptr && call.sinks[head] > -std::numeric_limits<float>::infinity()) {
    const float sink = call.sinks[head], top = sink > maximum ? sink : maximum;
    keep = std::exp(maximum - top);
    sum = sum * keep + std::exp(sink - top);
    maximum = top;
  }
  const bool empty = sum == 0;
  const float factor = empty ? 0.0f : keep / sum;
  if (call.lse != nullptr) {
    call.lse[token * call.query_heads + head] =
        empty ? -std::numeric_limits<float>::infinity() : maximum + std::log(sum);
  }
  const std::int64_t at = token * call.out_token_stride + std::int64_t{head} * call.out_head_stride;
  for (std::uint32_t c = 0; c < d; c += hn::MaxLanes(df)) {
    const auto x = hn::Mul(hn::LoadU(df, output + c), hn::Set(df, factor));
    if (call.out_type == Real::fp32) hn::StoreU(x, df, static_cast<float*>(call.out) + at + c);
    if (call.out_type == Real::fp16) store_half(df, x, static_cast<std::uint16_t*>(call.out) + at + c);
    if (call.out_type == Real::bf16) store_bf16(df, x, static_cast<std::uint16_t*>(call.out) + at + c);
  }
}

void finish_item_target(const AttendItem& item, const float* states) {
  const std::uint32_t d = item.call->model.geometry->layer[item.call->layer].head_dim;
  for (std::uint32_t h = 0; h < item.heads; ++h) {
    for (std::uint32_t r = 0; r < item.rows; ++r) {
      finish_row(item, item.kv_head + h, r, d, states + h * head_state_floats(item, d));
    }
  }
}

void clear_states(const AttendItem& item, std::uint32_t d, float* states) {
  std::memset(states, 0, sizeof(float) * item.heads * head_state_floats(item, d));
  for (std::uint32_t h = 0; h < item.heads; ++h) {
    for (std::uint32_t r = 0; r < item.rows; ++r) {
      states[h * head_state_floats(item, d) + r] = -std::numeric_limits<float>::infinity();
    }
  }
}

// The block that is read after (page, head h): the next head's, or the next page's first.
Ahead next_block(const AttendItem& item, std::uint32_t page, std::uint32_t h) {
  const bool same_page = h + 1 < item.heads;
  if (!same_page && page + 1 >= item.page_end) return {};
  const ResolvedPage& next = item.pages[page + (same_page ? 0 : 1) - item.first_page];
  if (next.base == nullptr) return {};
  const std::byte* at = next.base + next.layer_offset + (item.kv_head + (same_page ? h + 1 : 0)) * next.head_bytes;
  return {at, at + next.head_bytes};
}

void attend_item_target(const AttendItem& item) {
  static thread_local AttendScratch scratch;
  AttendScratch& s = scratch;
  const std::uint32_t d = item.call->model.geometry->layer[item.call->layer].head_dim;
  load_queries(item, d, s);
  float* states = item.partial != nullptr ? item.partial : s.state;
  clear_states(item, d, states);
  for (std::uint32_t page = item.page_begin; page < item.page_end; ++page) {
    for (std::uint32_t h = 0; h < item.heads; ++h) {
      float* state = states + h * head_state_floats(item, d);
      Rows rows{&s, item.kv_head + h, 0, d, state, state + item.rows, state + state_outputs(item)};
      s.q = s.queries + h * item.rows * d;
      s.q_finite = s.finite + h * item.rows;
      s.ahead = next_block(item, page, h);
      load_parameters(item, page, rows.kv_head, d, s);
      while (rows.first < item.rows) {
        const std::uint32_t left = item.rows - rows.first;
        if (left >= 4) rows_page<4>(item, rows, page);
        if (left == 3) rows_page<3>(item, rows, page);
        if (left == 2) rows_page<2>(item, rows, page);
        if (left == 1) rows_page<1>(item, rows, page);
        rows.first += left >= 4 ? 4 : left;
      }
    }
  }
  if (item.partial == nullptr) finish_item_target(item, states);
}
#endif  // HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvq
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvq {
HWY_EXPORT(attend_item_target);
HWY_EXPORT(finish_item_target);
void attend_item(const AttendItem& item) { HWY_DYNAMIC_DISPATCH(attend_item_target)(item); }
void finish_item(const AttendItem& item, const float* states) {
  HWY_DYNAMIC_DISPATCH(finish_item_target)(item, states);
}
}  // namespace kvq
#endif
