// Dense block <-> quantized block, vectorized.
//
// Invariant: exactly the results of int4_codec.h. Its division is one division here too, or (where there is a fused
// multiply-add) a reciprocal with one correction step, which gives the correctly rounded quotient for every divisor
// that is an fp16 number; a wrong last bit is only possible for quotients so small that adding 7.5 absorbs them. Both
// parts of a block go through an fp32 tile in natural order (64 tokens x d), which stays in the second-level cache.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/transcode_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstring>

#include "kernels/int4_codec.h"
#include "kernels/simd_common-inl.h"
#include "kernels/transcode_block.h"

HWY_BEFORE_NAMESPACE();
namespace kvq {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR
std::uint16_t largest_target(const std::uint16_t*, std::size_t) { return 0xffff; }
void quantize_target(Format, std::uint32_t, Dtype, const std::byte*, std::byte*) { KVQ_ASSERT(!"no vector unit"); }
void dequantize_target(Format, std::uint32_t, Dtype, const std::byte*, std::byte*) { KVQ_ASSERT(!"no vector unit"); }
#else

using F16 = hn::CappedTag<float, 16>;  // quantizing: two chunks of a dense row or a part of them
using I16 = hn::RebindToSigned<F16>;
using F8 = hn::CappedTag<float, 8>;  // dequantizing: one chunk or half of one
using I8 = hn::RebindToSigned<F8>;

// One group's parameters, ready for use: code = clamp(round((x - mid) / scale + offset), 0, top).
struct Groups {
  alignas(64) float min[kMaxHeadDim], max[kMaxHeadDim];
  alignas(64) float mid[kMaxHeadDim], scale[kMaxHeadDim], inverse[kMaxHeadDim], offset[kMaxHeadDim];
  alignas(64) std::uint16_t scale_bits[kMaxHeadDim], mid_bits[kMaxHeadDim];
};

struct TranscodeScratch {
  alignas(64) float tile[kPageTokens * kMaxHeadDim];
  Groups groups;
  alignas(64) std::uint16_t codes[kPageTokens][16];
  alignas(64) std::uint32_t words[4][8][4];
};

std::uint16_t largest_target(const std::uint16_t* elements, std::size_t count) {
  const hn::ScalableTag<std::uint16_t> d;
  const auto magnitude = hn::Set(d, std::uint16_t{0x7fff});
  auto a = hn::Zero(d), b = hn::Zero(d);
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t i = 0; i < count; i += 2 * lanes) {
    a = hn::Max(a, hn::And(hn::LoadU(d, elements + i), magnitude));
    b = hn::Max(b, hn::And(hn::LoadU(d, elements + i + lanes), magnitude));
  }
  HWY_ALIGN std::uint16_t lane[hn::MaxLanes(d)];
  hn::Store(hn::Max(a, b), d, lane);
  std::uint16_t largest = 0;
  for (std::size_t i = 0; i < lanes; ++i) largest = lane[i] > largest ? lane[i] : largest;
  return largest;
}

// Dense part -> fp32 tile, with each channel's range.
template <Dtype kType>
HWY_INLINE void load_channels(const std::uint16_t* part, std::uint32_t d, TranscodeScratch& s) {
  const F16 df;
  for (std::uint32_t c = 0; c < d; c += hn::MaxLanes(df)) {
    auto min = load_row<kType>(df, part, 0, c, d), max = min;
    hn::Store(min, df, s.tile + c);
    for (std::uint32_t token = 1; token < kPageTokens; ++token) {
      const auto x = load_row<kType>(df, part, token, c, d);
      min = hn::Min(min, x);
      max = hn::Max(max, x);
      hn::Store(x, df, s.tile + token * d + c);
    }
    hn::Store(min, df, s.groups.min + c);
    hn::Store(max, df, s.groups.max + c);
  }
}

// Dense part -> fp32 tile, with each token's range.
template <Dtype kType>
HWY_INLINE void load_tokens(const std::uint16_t* part, std::uint32_t d, TranscodeScratch& s) {
  const F16 df;
  for (std::uint32_t token = 0; token < kPageTokens; ++token) {
    auto min = load_row<kType>(df, part, token, 0, d), max = min;
    for (std::uint32_t c = 0; c < d; c += hn::MaxLanes(df)) {
      const auto x = load_row<kType>(df, part, token, c, d);
      min = hn::Min(min, x);
      max = hn::Max(max, x);
      hn::Store(x, df, s.tile + token * d + c);
    }
    s.groups.min[token] = hn::GetLane(hn::MinOfLanes(df, min));
    s.groups.max[token] = hn::GetLane(hn::MaxOfLanes(df, max));
  }
}

void make_groups(Groups& g, std::uint32_t count, float top) {
  const F16 df;
  for (std::uint32_t i = 0; i < count; i += hn::MaxLanes(df)) {
    const auto min = hn::Load(df, g.min + i);
    const auto scale = hn::Div(hn::Abs(hn::Sub(hn::Load(df, g.max + i), min)), hn::Set(df, top));
    store_half(df, scale, g.scale_bits + i);
    store_half(df, hn::Add(min, hn::Mul(hn::Set(df, 0.5f * top), scale)), g.mid_bits + i);
    const auto rounded = load16<Dtype::fp16>(df, g.scale_bits + i);
    const auto constant = hn::Eq(rounded, hn::Zero(df));
    const auto divisor = hn::IfThenElse(constant, hn::Set(df, 1.0f), rounded);
    hn::Store(rounded, df, g.scale + i);
    hn::Store(load16<Dtype::fp16>(df, g.mid_bits + i), df, g.mid + i);
    hn::Store(hn::IfThenZeroElse(constant, hn::Div(hn::Set(df, 1.0f), divisor)), df, g.inverse + i);
    hn::Store(hn::IfThenZeroElse(constant, hn::Set(df, 0.5f * top)), df, g.offset + i);
  }
}

void store_groups(const Groups& g, std::uint32_t count, std::uint16_t* scales, std::uint16_t* mids) {
  for (std::uint32_t x = 0; x < count; x += 2) {  // pairs e = 0, 1 are neighbours in every order
    std::memcpy(scales + scale_index(x, count), g.scale_bits + x, 4);
    std::memcpy(mids + mid_index(x, count), g.mid_bits + x, 4);
  }
}

struct Codec {
  hn::Vec<F16> mid, scale, inverse, offset, top;
};

HWY_INLINE hn::Vec<I16> codes_of(const Codec& c, hn::Vec<F16> x) {
  const F16 df;
  const auto a = hn::Sub(x, c.mid);
#if HWY_NATIVE_FMA
  const auto guess = hn::Mul(a, c.inverse);
  const auto steps = hn::MulAdd(hn::NegMulAdd(guess, c.scale, a), c.inverse, guess);
#else
  const auto steps = hn::IfThenZeroElse(hn::Eq(c.scale, hn::Zero(df)), hn::Div(a, c.scale));
#endif
  const auto code = hn::Min(hn::Max(hn::Add(steps, c.offset), hn::Zero(df)), c.top);
  return hn::NearestInt(code);
}

// Codes of 16 channels (tile kt) of one token, as 16-bit integers.
HWY_INLINE void code_row(const float* row, const Codec* codec, std::uint16_t* out) {
  const F16 df;
  const hn::Rebind<std::int16_t, F16> d16;
  for (std::uint32_t i = 0; i < 16; i += hn::MaxLanes(df)) {
    const auto codes = codes_of(codec[i / hn::MaxLanes(df)], hn::LoadU(df, row + i));
    hn::StoreU(hn::DemoteTo(d16, codes), d16, reinterpret_cast<std::int16_t*>(out) + i);
  }
}

// Words [g][t][mt] of one K tile from codes[64][16]; `shift` picks the high or low nibble of 8-bit codes.
template <int kShift>
HWY_INLINE void pack_keys(const std::uint16_t (*codes)[16], std::uint32_t* words) {
  const hn::FixedTag<std::uint32_t, 4> d4;
  const auto nibble = hn::Set(d4, 0x000f000fu);
  const auto half = [&](std::uint32_t token, std::uint32_t h) HWY_ATTR {
    std::uint32_t const* p = reinterpret_cast<const std::uint32_t*>(codes[token]) + h * 4;
    return hn::And(hn::ShiftRight<kShift>(hn::Load(d4, p)), nibble);
  };
  for (std::uint32_t g = 0; g < 8; ++g) {
    hn::Vec<decltype(d4)> w[4];
    for (std::uint32_t mt = 0; mt < 4; ++mt) {
      const std::uint32_t token = 16 * mt + g;
      const auto low = hn::Or(half(token, 0), hn::ShiftLeft<4>(half(token + 8, 0)));
      const auto high = hn::Or(half(token, 1), hn::ShiftLeft<4>(half(token + 8, 1)));
      w[mt] = hn::Or(low, hn::ShiftLeft<8>(high));
    }
    hn::StoreInterleaved4(w[0], w[1], w[2], w[3], d4, words + g * 16);
  }
}

void quantize_keys(Format format, std::uint32_t d, std::byte* block, const BlockOffsets& at, TranscodeScratch& s) {
  const F16 df;
  const float top = format == Format::k8v4 ? kTop8 : kTop4;
  for (std::uint32_t kt = 0; kt < d / 16; ++kt) {
    Codec codec[16 / hn::MaxLanes(df)];
    for (std::uint32_t i = 0; i < 16; i += hn::MaxLanes(df)) {
      const std::uint32_t c = kt * 16 + i;
      codec[i / hn::MaxLanes(df)] = {hn::Load(df, s.groups.mid + c), hn::Load(df, s.groups.scale + c),
                                     hn::Load(df, s.groups.inverse + c), hn::Load(df, s.groups.offset + c),
                                     hn::Set(df, top)};
    }
    for (std::uint32_t token = 0; token < kPageTokens; ++token) {
      code_row(s.tile + token * d + kt * 16, codec, s.codes[token]);
    }
    auto* words = reinterpret_cast<std::uint32_t*>(block + at.k) + kt * 128;
    if (format == Format::k8v4) {
      pack_keys<4>(s.codes, words);
      pack_keys<0>(s.codes, reinterpret_cast<std::uint32_t*>(block + at.k_low) + kt * 128);
    } else {
      pack_keys<0>(s.codes, words);
    }
  }
}

// One V tile of 16 tokens x 16 channels -> s.words[t][g][i].
HWY_INLINE void pack_value_tile(const float* tile, std::uint32_t d, const Groups& groups, std::uint32_t token0,
                                std::uint32_t (*out)[8][4], std::uint32_t i) {
  const F16 df;
  const hn::RebindToUnsigned<F16> du;
  HWY_ALIGN std::uint32_t lane[16];  // by channel; bits of the four tokens that share a word
  for (std::uint32_t t = 0; t < 4; ++t) {
    for (std::uint32_t c = 0; c < 16; c += hn::MaxLanes(df)) {
      const auto codes = [&](std::uint32_t token) HWY_ATTR {
        const Codec codec{hn::Set(df, groups.mid[token]), hn::Set(df, groups.scale[token]),
                          hn::Set(df, groups.inverse[token]), hn::Set(df, groups.offset[token]), hn::Set(df, kTop4)};
        return hn::BitCast(du, codes_of(codec, hn::LoadU(df, tile + token * d + c)));
      };
      const std::uint32_t token = token0 + 2 * t;
      const auto even = hn::Or(codes(token), hn::ShiftLeft<8>(codes(token + 8)));
      const auto odd = hn::Or(codes(token + 1), hn::ShiftLeft<8>(codes(token + 9)));
      hn::Store(hn::Or(even, hn::ShiftLeft<16>(odd)), du, lane + c);
    }
    for (std::uint32_t g = 0; g < 8; ++g) out[t][g][i] = lane[g] | (lane[g + 8] << 4);
  }
}

void quantize_values(std::uint32_t d, std::byte* block, const BlockOffsets& at, TranscodeScratch& s) {
  const std::uint32_t tiles = d / 16;
  auto* words = reinterpret_cast<std::uint32_t*>(block + at.v);
  for (std::uint32_t kt = 0; kt < 4; ++kt) {
    for (std::uint32_t first = 0; first < tiles; first += 4) {
      const std::uint32_t width = tiles - first < 4 ? tiles - first : 4;
      for (std::uint32_t i = 0; i < width; ++i) {
        pack_value_tile(s.tile + (first + i) * 16, d, s.groups, kt * 16, s.words, i);
      }
      std::uint32_t* out = words + kt * tiles * 32 + first * 32;
      for (std::uint32_t g = 0; g < 8; ++g) {
        for (std::uint32_t t = 0; t < 4; ++t) std::memcpy(out + (4 * g + t) * width, s.words[t][g], 4 * width);
      }
    }
  }
}

// Takes the channels of largest range out of the codes and keeps them as they are. Ties go to the lower channel; the
// list ascends.
void keep_channels(std::uint32_t kept, std::uint32_t d, const std::uint16_t* k, std::byte* block,
                   const BlockOffsets& at, Groups& g) {
  auto* list = reinterpret_cast<std::uint16_t*>(block + at.channels);
  auto* values = reinterpret_cast<std::uint16_t*>(block + at.kept);
  bool taken[kMaxHeadDim] = {};
  for (std::uint32_t n = 0; n < kept; ++n) {
    std::uint32_t best = d;
    for (std::uint32_t c = 0; c < d; ++c) {
      if (!taken[c] && (best == d || g.max[c] - g.min[c] > g.max[best] - g.min[best])) best = c;
    }
    taken[best] = true;
  }
  std::memset(list, 0xff, 16);
  std::memset(list + 8, 0, kChannelListBytes - 16);
  std::uint32_t n = 0;
  for (std::uint32_t c = 0; c < d; ++c) {
    if (!taken[c]) continue;
    list[n] = static_cast<std::uint16_t>(c);
    for (std::uint32_t token = 0; token < kPageTokens; ++token) {
      values[n * kPageTokens + token] = k[dense_index(token, c, d)];
    }
    ++n;
    g.scale_bits[c] = g.mid_bits[c] = 0;
    g.mid[c] = g.scale[c] = g.inverse[c] = g.offset[c] = 0;
  }
}

void quantize_target(Format format, std::uint32_t d, Dtype dtype, const std::byte* dense, std::byte* block) {
  static thread_local TranscodeScratch scratch;
  TranscodeScratch& s = scratch;
  const BlockOffsets at = block_offsets(format, d);
  const auto* k = reinterpret_cast<const std::uint16_t*>(dense);
  const std::uint16_t* v = k + kPageTokens * d;
  dtype == Dtype::fp16 ? load_channels<Dtype::fp16>(k, d, s) : load_channels<Dtype::bf16>(k, d, s);
  make_groups(s.groups, d, format == Format::k8v4 ? kTop8 : kTop4);
  if (kept_channels(format) != 0) keep_channels(kept_channels(format), d, k, block, at, s.groups);
  quantize_keys(format, d, block, at, s);
  store_groups(s.groups, d, reinterpret_cast<std::uint16_t*>(block + at.k_scale),
               reinterpret_cast<std::uint16_t*>(block + at.k_mid));
  dtype == Dtype::fp16 ? load_tokens<Dtype::fp16>(v, d, s) : load_tokens<Dtype::bf16>(v, d, s);
  make_groups(s.groups, kPageTokens, kTop4);
  quantize_values(d, block, at, s);
  store_groups(s.groups, kPageTokens, reinterpret_cast<std::uint16_t*>(block + at.v_scale),
               reinterpret_cast<std::uint16_t*>(block + at.v_mid));
  const std::uint32_t used = at.v_mid + 2 * kPageTokens;
  std::memset(block + used, 0, round_up(used, 128) - used);
}

// --- back to dense -------------------------------------------------------------------------------------------------

// 8 codes (as floats minus top / 2) -> one 16-byte chunk.
template <Dtype kType>
HWY_INLINE void store_values(hn::Vec<F8> steps, hn::Vec<F8> scale, hn::Vec<F8> mid, std::uint16_t* out) {
  const F8 df;
  const auto x = hn::Add(mid, hn::Mul(steps, scale));
  if constexpr (kType == Dtype::bf16) {
    store_bf16(df, x, out);
  } else {
    store_half(df, hn::Min(hn::Max(x, hn::Set(df, -65504.0f)), hn::Set(df, 65504.0f)), out);
  }
}

// 8 codes as 16-bit integers in memory order -> one chunk of a dense row.
template <Dtype kType>
HWY_INLINE void store_chunk(const std::uint32_t* pairs, float center, const float* scale, const float* mid,
                            std::uint16_t* out) {
  const F8 df;
  const I8 di;
  const hn::Rebind<std::int16_t, F8> d16;
  for (std::uint32_t i = 0; i < 8; i += hn::MaxLanes(df)) {
    const auto code = hn::LoadU(d16, reinterpret_cast<const std::int16_t*>(pairs) + i);
    const auto steps = hn::Sub(hn::ConvertTo(df, hn::PromoteTo(di, code)), hn::Set(df, center));
    store_values<kType>(steps, hn::LoadU(df, scale + i), hn::LoadU(df, mid + i), out + i);
  }
}

template <Dtype kType>
void dequantize_keys(Format format, std::uint32_t d, const std::byte* block, const BlockOffsets& at, const float* scale,
                     const float* mid, std::uint16_t* out) {
  using Words = hn::FixedTag<std::uint32_t, 4>;
  const Words d4;
  const bool wide = format == Format::k8v4;
  const float center = wide ? 0.5f * kTop8 : 0.5f * kTop4;
  const auto nibble = hn::Set(d4, 0x000f000fu);
  HWY_ALIGN std::uint32_t pairs[4];
  for (std::uint32_t tile = 0; tile < d / 16 * 8; ++tile) {  // (kt, g): words [t][mt]
    const std::uint32_t c = tile / 8 * 16, g = tile % 8;
    hn::Vec<Words> w[4], low[4];
    hn::LoadInterleaved4(d4, reinterpret_cast<const std::uint32_t*>(block + at.k) + tile * 16, w[0], w[1], w[2], w[3]);
    low[0] = low[1] = low[2] = low[3] = hn::Zero(d4);
    if (wide) {
      const auto* words = reinterpret_cast<const std::uint32_t*>(block + at.k_low) + tile * 16;
      hn::LoadInterleaved4(d4, words, low[0], low[1], low[2], low[3]);
    }
    for (std::uint32_t mt = 0; mt < 4; ++mt) {
      for (std::uint32_t j = 0; j < 4; ++j) {  // token + 8 (j & 1), channel + 8 (j >> 1)
        auto codes = hn::And(w[mt], nibble);
        if (wide) codes = hn::Or(hn::ShiftLeft<4>(codes), hn::And(low[mt], nibble));
        w[mt] = hn::ShiftRight<4>(w[mt]);
        low[mt] = hn::ShiftRight<4>(low[mt]);
        hn::Store(codes, d4, pairs);
        const std::uint32_t token = 16 * mt + g + 8 * (j & 1), first = c + 8 * (j >> 1);
        store_chunk<kType>(pairs, center, scale + first, mid + first, out + dense_index(token, first, d));
      }
    }
  }
}

template <Dtype kType>
void dequantize_values(std::uint32_t d, const std::uint32_t* words, const float* scale, const float* mid,
                       std::uint16_t* out) {
  const F8 df;
  const I8 di;
  const auto nibble = hn::Set(di, 15);
  HWY_ALIGN std::int32_t column[8];  // the words of one (kt, ct, t), by g
  for (std::uint32_t token = 0; token < kPageTokens; token += token % 8 == 6 ? 10 : 2) {  // 16 kt + 2 t
    for (std::uint32_t c = 0; c < d; c += 16) {
      const std::uint32_t first = v_code_at(token, c, d).word, stride = v_code_at(token, c + 1, d).word - first;
      for (std::uint32_t g = 0; g < 8; ++g) column[g] = static_cast<std::int32_t>(words[first + g * stride]);
      for (std::uint32_t n = 0; n < 8; ++n) {  // nibble 4 e + j
        const std::uint32_t at = token + n / 4 + 8 * (n % 4 / 2), channel = c + 8 * (n & 1);
        const auto s = hn::Set(df, scale[at]), m = hn::Set(df, mid[at]);
        for (std::uint32_t i = 0; i < 8; i += hn::MaxLanes(df)) {
          const auto code = hn::And(hn::ShiftRightSame(hn::Load(di, column + i), static_cast<int>(4 * n)), nibble);
          const auto steps = hn::Sub(hn::ConvertTo(df, code), hn::Set(df, 0.5f * kTop4));
          store_values<kType>(steps, s, m, out + dense_index(at, channel, d) + i);
        }
      }
    }
  }
}

template <Dtype kType>
void dequantize_typed(Format format, std::uint32_t d, const std::byte* block, std::byte* dense) {
  const BlockOffsets at = block_offsets(format, d);
  const auto parameter = [&](std::uint32_t offset, std::uint32_t index) {
    return half_to_float(reinterpret_cast<const std::uint16_t*>(block + offset)[index]);
  };
  float scale[kMaxHeadDim], mid[kMaxHeadDim];
  for (std::uint32_t c = 0; c < d; ++c) {
    scale[c] = parameter(at.k_scale, scale_index(c, d));
    mid[c] = parameter(at.k_mid, mid_index(c, d));
  }
  auto* out = reinterpret_cast<std::uint16_t*>(dense);
  dequantize_keys<kType>(format, d, block, at, scale, mid, out);
  for (std::uint32_t n = 0; n < kept_channels(format); ++n) {
    const std::uint16_t c = reinterpret_cast<const std::uint16_t*>(block + at.channels)[n];
    if (c >= d) continue;  // unused
    const auto* kept = reinterpret_cast<const std::uint16_t*>(block + at.kept) + n * kPageTokens;
    for (std::uint32_t token = 0; token < kPageTokens; ++token) out[dense_index(token, c, d)] = kept[token];
  }
  for (std::uint32_t token = 0; token < kPageTokens; ++token) {
    scale[token] = parameter(at.v_scale, scale_index(token, kPageTokens));
    mid[token] = parameter(at.v_mid, mid_index(token, kPageTokens));
  }
  dequantize_values<kType>(d, reinterpret_cast<const std::uint32_t*>(block + at.v), scale, mid, out + kPageTokens * d);
}

void dequantize_target(Format format, std::uint32_t d, Dtype dtype, const std::byte* block, std::byte* dense) {
  dtype == Dtype::fp16 ? dequantize_typed<Dtype::fp16>(format, d, block, dense)
                       : dequantize_typed<Dtype::bf16>(format, d, block, dense);
}
#endif  // HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvq
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvq {
HWY_EXPORT(largest_target);
HWY_EXPORT(quantize_target);
HWY_EXPORT(dequantize_target);
std::uint16_t largest_pattern(const std::uint16_t* elements, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(largest_target)(elements, count);
}
void quantize(Format format, std::uint32_t d, Dtype dtype, const std::byte* dense, std::byte* block) {
  HWY_DYNAMIC_DISPATCH(quantize_target)(format, d, dtype, dense, block);
}
void dequantize(Format format, std::uint32_t d, Dtype dtype, const std::byte* block, std::byte* dense) {
  HWY_DYNAMIC_DISPATCH(dequantize_target)(format, d, dtype, block, dense);
}
}  // namespace kvq
#endif
