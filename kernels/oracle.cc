// Invariant: as in oracle.h. Nothing here is fast, and nothing here is used outside tests.
#include "kernels/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvq::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

float once(double x) { return static_cast<float>(x); }  // one fp32 rounding of an exact double result

// Visits every 4-bit code of K: place(token, channel, word, bit).
template <typename Place>
void walk_keys(std::uint32_t d, Place place) {
  std::uint32_t word = 0;
  for (std::uint32_t kt = 0; kt < d / 16; ++kt)
    for (std::uint32_t g = 0; g < 8; ++g)
      for (std::uint32_t t = 0; t < 4; ++t)
        for (std::uint32_t mt = 0; mt < 4; ++mt, ++word)
          for (std::uint32_t e = 0; e < 2; ++e)
            for (std::uint32_t j = 0; j < 4; ++j)
              place(16 * mt + g + 8 * (j & 1), 16 * kt + 2 * t + e + 8 * (j >> 1), word, 16 * e + 4 * j);
}

template <typename Place>
void walk_values(std::uint32_t d, Place place) {
  std::uint32_t word = 0;
  for (std::uint32_t kt = 0; kt < 4; ++kt)
    for (std::uint32_t first = 0; first < d / 16; first += 4)
      for (std::uint32_t g = 0; g < 8; ++g)
        for (std::uint32_t t = 0; t < 4; ++t)
          for (std::uint32_t ct = first; ct < std::min(first + 4, d / 16); ++ct, ++word)
            for (std::uint32_t e = 0; e < 2; ++e)
              for (std::uint32_t j = 0; j < 4; ++j)
                place(16 * kt + 2 * t + e + 8 * (j >> 1), 16 * ct + g + 8 * (j & 1), word, 16 * e + 4 * j);
}

// Item of each position of a parameter array: scales [kt/2][t][kt&1][h][e], midpoints [kt/2][t][h][kt&1][e].
std::vector<std::uint32_t> parameter_order(std::uint32_t count, bool mids) {
  std::vector<std::uint32_t> items;
  for (std::uint32_t pair = 0; pair < count / 16; pair += 2)
    for (std::uint32_t t = 0; t < 4; ++t)
      for (std::uint32_t a = 0; a < 2; ++a)
        for (std::uint32_t b = 0; b < 2; ++b)
          for (std::uint32_t e = 0; e < 2; ++e) {
            const std::uint32_t kt = pair + (mids ? b : a), h = mids ? a : b;
            if (kt < count / 16) items.push_back(16 * kt + 2 * t + e + 8 * h);
          }
  return items;
}

std::uint32_t word_at(const std::byte* block, std::uint32_t offset, std::uint32_t word) {
  std::uint32_t w;
  std::memcpy(&w, block + offset + 4 * std::size_t{word}, 4);
  return w;
}

std::uint16_t half_at(const std::byte* block, std::uint32_t offset, std::uint32_t index) {
  std::uint16_t h;
  std::memcpy(&h, block + offset + 2 * std::size_t{index}, 2);
  return h;
}

std::vector<double> parameters(const std::byte* block, std::uint32_t offset, std::uint32_t count, bool mids) {
  std::vector<double> values(count);
  const std::vector<std::uint32_t> order = parameter_order(count, mids);
  for (std::uint32_t i = 0; i < count; ++i) values[order[i]] = decode_element(half_at(block, offset, i), Dtype::fp16);
  return values;
}

struct Group {
  std::uint16_t scale = 0, mid = 0;
  std::uint32_t code(double x, double top) const {
    const double s = decode_element(scale, Dtype::fp16), m = decode_element(mid, Dtype::fp16);
    if (s == 0) return 0;
    const float steps = once(once(x - m) / s);
    const double rounded = std::nearbyint(double{once(steps + top / 2)});
    return static_cast<std::uint32_t>(std::clamp(rounded, 0.0, top));
  }
};

Group make_group(const std::vector<double>& values, double top) {
  const double min = *std::min_element(values.begin(), values.end());
  const double max = *std::max_element(values.begin(), values.end());
  const float scale = once(once(max - min) / top);
  return {static_cast<std::uint16_t>(encode_half(scale) & 0x7fff), encode_half(once(min + once(top / 2 * scale)))};
}

void put_half(std::byte* out, std::uint32_t offset, std::uint32_t index, std::uint16_t value) {
  std::memcpy(out + offset + 2 * std::size_t{index}, &value, 2);
}

void put_parameters(std::byte* out, std::uint32_t scale_at, std::uint32_t mid_at, const std::vector<Group>& groups) {
  const std::uint32_t count = static_cast<std::uint32_t>(groups.size());
  const auto scales = parameter_order(count, false), mids = parameter_order(count, true);
  for (std::uint32_t i = 0; i < count; ++i) {
    put_half(out, scale_at, i, groups[scales[i]].scale);
    put_half(out, mid_at, i, groups[mids[i]].mid);
  }
}

void put_nibble(std::byte* out, std::uint32_t offset, std::uint32_t word, std::uint32_t bit, std::uint32_t nibble) {
  std::uint32_t w = word_at(out, offset, word);
  w |= nibble << bit;
  std::memcpy(out + offset + 4 * std::size_t{word}, &w, 4);
}

std::vector<double> column(const std::vector<double>& m, std::uint32_t c, std::uint32_t d) {
  std::vector<double> values(kPageTokens);
  for (std::uint32_t t = 0; t < kPageTokens; ++t) values[t] = m[t * d + c];
  return values;
}

// Channels by falling range, the lower one first among equals; the `kept` first of them, ascending.
std::vector<std::uint32_t> widest(const std::vector<double>& k, std::uint32_t d, std::uint32_t kept) {
  std::vector<std::pair<double, std::uint32_t>> ranked;
  for (std::uint32_t c = 0; c < d; ++c) {
    const auto values = column(k, c, d);
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    ranked.emplace_back(-double{once(*high - *low)}, c);
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<std::uint32_t> channels;
  for (std::uint32_t n = 0; n < kept; ++n) channels.push_back(ranked[n].second);
  std::sort(channels.begin(), channels.end());
  return channels;
}

}  // namespace

double decode_element(std::uint16_t bits, Dtype dtype) {
  const int exponent_bits = dtype == Dtype::fp16 ? 5 : 8, mantissa_bits = 15 - exponent_bits;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1), bias = (1 << (exponent_bits - 1)) - 1;
  const double mantissa = bits & ((1 << mantissa_bits) - 1), sign = (bits >> 15) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? std::nan("") : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

std::uint16_t encode_half(double x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | 0x7c00;
  const int exponent = std::max(std::ilogb(magnitude), -14);
  const double units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // of 2^(exponent - 10)
  // units is below 1024 for subnormals, and may be 2048: both carry into the exponent field as they should.
  const double bits = units + (exponent + 14) * 1024.0;
  return bits >= 0x7c00 ? sign | 0x7c00 : static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(bits));
}

Block read_block(Format format, std::uint32_t d, Dtype dtype, const std::byte* block) {
  Block out{std::vector<double>(kPageTokens * d), std::vector<double>(kPageTokens * d)};
  const BlockOffsets at = block_offsets(format, d);
  if (format == Format::dense) {
    for (std::uint32_t t = 0; t < kPageTokens; ++t) {
      for (std::uint32_t c = 0; c < d; ++c) {
        const std::uint32_t chunk = c / 8, group = chunk / 8;
        const std::uint32_t place = group * 8 + 8 <= d / 8 ? group * 8 + ((chunk % 8) ^ (t % 8)) : chunk;
        out.k[t * d + c] = decode_element(half_at(block, at.k, t * d + place * 8 + c % 8), dtype);
        out.v[t * d + c] = decode_element(half_at(block, at.v, t * d + place * 8 + c % 8), dtype);
      }
    }
    return out;
  }
  const bool wide = format == Format::k8v4;
  const auto k_scale = parameters(block, at.k_scale, d, false), k_mid = parameters(block, at.k_mid, d, true);
  walk_keys(d, [&](std::uint32_t t, std::uint32_t c, std::uint32_t word, std::uint32_t bit) {
    double code = (word_at(block, at.k, word) >> bit) & 15;
    if (wide) code = 16 * code + ((word_at(block, at.k_low, word) >> bit) & 15);
    out.k[t * d + c] = k_mid[c] + (code - (wide ? 127.5 : 7.5)) * k_scale[c];
  });
  const auto v_scale = parameters(block, at.v_scale, 64, false), v_mid = parameters(block, at.v_mid, 64, true);
  walk_values(d, [&](std::uint32_t t, std::uint32_t c, std::uint32_t word, std::uint32_t bit) {
    out.v[t * d + c] = v_mid[t] + (((word_at(block, at.v, word) >> bit) & 15) - 7.5) * v_scale[t];
  });
  for (std::uint32_t n = 0; n < kept_channels(format); ++n) {
    const std::uint16_t c = half_at(block, at.channels, n);
    if (c == kNoChannel) continue;
    for (std::uint32_t t = 0; t < kPageTokens; ++t) {
      out.k[t * d + c] = decode_element(half_at(block, at.kept, n * kPageTokens + t), dtype);
    }
  }
  return out;
}

void quantize_block(Format format, std::uint32_t d, Dtype dtype, const std::byte* dense, std::byte* out) {
  const Block in = read_block(Format::dense, d, dtype, dense);
  const BlockOffsets at = block_offsets(format, d);
  std::memset(out, 0, at.end);
  const bool wide = format == Format::k8v4;
  std::vector<Group> keys, values;
  for (std::uint32_t c = 0; c < d; ++c) keys.push_back(make_group(column(in.k, c, d), wide ? 255 : 15));
  for (std::uint32_t t = 0; t < kPageTokens; ++t) {
    values.push_back(make_group({in.v.begin() + t * d, in.v.begin() + (t + 1) * d}, 15));
  }
  if (const std::uint32_t kept = kept_channels(format); kept != 0) {
    for (std::uint32_t n = 0; n < 8; ++n) put_half(out, at.channels, n, kNoChannel);
    const auto channels = widest(in.k, d, kept);
    for (std::uint32_t n = 0; n < kept; ++n) {
      keys[channels[n]] = Group{};
      put_half(out, at.channels, n, static_cast<std::uint16_t>(channels[n]));
      for (std::uint32_t t = 0; t < kPageTokens; ++t) {
        const std::uint32_t c = channels[n], group = c / 64 * 8;
        const std::uint32_t chunk = group + 8 <= d / 8 ? group + ((c / 8 % 8) ^ (t % 8)) : c / 8;
        put_half(out, at.kept, n * kPageTokens + t, half_at(dense, 0, t * d + chunk * 8 + c % 8));
      }
    }
  }
  walk_keys(d, [&](std::uint32_t t, std::uint32_t c, std::uint32_t word, std::uint32_t bit) {
    const std::uint32_t code = keys[c].code(in.k[t * d + c], wide ? 255 : 15);
    put_nibble(out, at.k, word, bit, wide ? code / 16 : code);
    if (wide) put_nibble(out, at.k_low, word, bit, code % 16);
  });
  walk_values(d, [&](std::uint32_t t, std::uint32_t c, std::uint32_t word, std::uint32_t bit) {
    put_nibble(out, at.v, word, bit, values[t].code(in.v[t * d + c], 15));
  });
  put_parameters(out, at.k_scale, at.k_mid, keys);
  put_parameters(out, at.v_scale, at.v_mid, values);
}

}  // namespace kvq::oracle
