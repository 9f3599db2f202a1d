// Where every byte of a page is: one block per (layer, KV head), in one of the formats of types.h.
//
// Invariant: every offset is a pure function of (geometry, format), computed here once for the daemon, the client, the
// host kernels and the CUDA kernels; all blocks are multiples of 128 bytes, all arithmetic is 64-bit.
//
//   page = layer 0 head 0 | layer 0 head 1 | ... | layer 1 head 0 | ...        (page_bytes rounded up to 256)
//
//   dense block:  K[64][d] then V[64][d], 16-bit. The 16-byte chunk c of token t's row lies at chunk dense_chunk(t, c, d):
//                 chunks XOR (t & 7) inside every full group of 8 chunks; a last partial group is in plain order.
//   int4 block:   | K codes 32 d | K scale 2 d | K mid 2 d | V codes 32 d | V scale 128 | V mid 128 | pad to 128 |
//                 d = 128: 0, 4096, 4352, 4608, 8704, 8832 -> 8,960 bytes.   d = 64: 4,608 bytes.
//   int4_kN:      an int4 block, then | channel list u16[8], 0xffff = unused, in 128 bytes | K[N][64] 16-bit |
//                 The kept channels have scale 0 and mid 0 in the int4 part and contribute from the list alone.
//   k8v4 block:   | K high nibbles 32 d | K low nibbles 32 d | K scale | K mid | V codes | V scale | V mid | pad |
//                 code = 16 high + low, 0..255; value = mid + (code - 127.5) scale.
//
// Orders are those of tensor-core fragments (mma.m16n8k16), so that a GPU warp loads operands without moves. With
// g = 0..7, t = 0..3, lane = 4 g + t; in a 32-bit word, half e = 0..1 and nibble j = 0..3 sits at bit 16 e + 4 j:
//   K word [kt][lane][mt]:  token = 16 mt + g + 8 (j & 1), channel = 16 kt + 2 t + e + 8 (j >> 1)       kt < d/16, mt < 4
//   V word [kt][ct/4][lane][ct & 3]:  channel = 16 ct + g + 8 (j & 1), token = 16 kt + 2 t + e + 8 (j >> 1)   kt < 4
//     (a last group of ct's that is not full has as many words per lane as it has ct's)
//   scale of x = 16 kt + 2 t + e + 8 h (channel for K, token for V): [kt/2][t][kt & 1][h][e] fp16
//   mid of the same x:                                                [kt/2][t][h][kt & 1][e] fp16
//     (a last kt without a partner is stored as if [kt & 1] had one value)
#pragma once

#include "kvq/types.h"

namespace kvq {

KVQ_HD constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// --- one block -----------------------------------------------------------------------------------------------------

inline constexpr std::uint32_t kChannelListBytes = 128;
inline constexpr std::uint16_t kNoChannel = 0xffff;

KVQ_HD constexpr bool head_dim_supported(std::uint32_t d) {
  return d == 64 || d == 80 || d == 96 || d == 128 || d == 192 || d == 256;
}

KVQ_HD constexpr std::uint32_t kept_channels(Format f) {
  return f == Format::int4_k4 ? 4u : f == Format::int4_k8 ? 8u : 0u;
}

// Byte offsets of the parts of a block with `d` channels; unused parts have the value of `end`.
struct BlockOffsets {
  std::uint32_t k;         // dense: K rows; otherwise K codes (k8v4: the high nibbles)
  std::uint32_t k_low;     // k8v4 only: the low nibbles
  std::uint32_t k_scale;
  std::uint32_t k_mid;
  std::uint32_t v;         // dense: V rows; otherwise V codes
  std::uint32_t v_scale;
  std::uint32_t v_mid;
  std::uint32_t channels;  // int4_kN only: the channel list
  std::uint32_t kept;      // int4_kN only: K[N][64]
  std::uint32_t end;       // size of the block, a multiple of 128
};

KVQ_HD constexpr BlockOffsets block_offsets(Format f, std::uint32_t d) {
  BlockOffsets o{};
  const std::uint32_t codes = kPageTokens * d / 2;
  std::uint32_t at = 0;
  if (f == Format::dense) {
    o.v = kPageTokens * d * 2;
    o.end = 2 * o.v;
    o.k_low = o.k_scale = o.k_mid = o.v_scale = o.v_mid = o.channels = o.kept = o.end;
    return o;
  }
  at += codes;
  if (f == Format::k8v4) {
    o.k_low = at;
    at += codes;
  }
  o.k_scale = at;
  at += 2 * d;
  o.k_mid = at;
  at += 2 * d;
  o.v = at;
  at += codes;
  o.v_scale = at;
  at += 2 * kPageTokens;
  o.v_mid = at;
  at += 2 * kPageTokens;
  at = static_cast<std::uint32_t>(round_up(at, 128));
  if (kept_channels(f) != 0) {
    o.channels = at;
    at += kChannelListBytes;
    o.kept = at;
    at += kept_channels(f) * kPageTokens * 2;
  }
  o.end = at;
  if (f != Format::k8v4) o.k_low = o.end;
  if (kept_channels(f) == 0) o.channels = o.kept = o.end;
  return o;
}

KVQ_HD constexpr std::uint64_t block_bytes(Format f, std::uint32_t d) { return block_offsets(f, d).end; }

static_assert(block_bytes(Format::dense, 128) == 32768 && block_bytes(Format::dense, 64) == 16384);
static_assert(block_bytes(Format::int4, 128) == 8960 && block_bytes(Format::int4, 64) == 4608);
static_assert(block_offsets(Format::int4, 128).k_scale == 4096 && block_offsets(Format::int4, 128).k_mid == 4352);
static_assert(block_offsets(Format::int4, 128).v == 4608 && block_offsets(Format::int4, 128).v_scale == 8704);
static_assert(block_offsets(Format::int4, 128).v_mid == 8832);

// Position of 16-byte chunk `c` of a dense row (see the drawing above). Its own inverse.
KVQ_HD constexpr std::uint32_t dense_chunk(std::uint32_t token, std::uint32_t c, std::uint32_t d) {
  const std::uint32_t swizzled = (d / 8) & ~7u;
  return c < swizzled ? c ^ (token & 7) : c;
}

// Index, in 16-bit elements, of element (token, channel) in a dense K or V part.
KVQ_HD constexpr std::uint32_t dense_index(std::uint32_t token, std::uint32_t channel, std::uint32_t d) {
  return token * d + dense_chunk(token, channel / 8, d) * 8 + channel % 8;
}

// Place of a 4-bit code: word index and bit shift.
struct CodeAt {
  std::uint32_t word;
  std::uint32_t shift;
};

KVQ_HD constexpr CodeAt k_code_at(std::uint32_t token, std::uint32_t channel) {
  const std::uint32_t mt = token / 16, kt = channel / 16, g = token % 8, t = channel % 8 / 2;
  const std::uint32_t j = (token % 16 / 8) + 2 * (channel % 16 / 8), e = channel % 2;
  return {kt * 128 + (4 * g + t) * 4 + mt, 16 * e + 4 * j};
}

KVQ_HD constexpr CodeAt v_code_at(std::uint32_t token, std::uint32_t channel, std::uint32_t d) {
  const std::uint32_t tiles = d / 16, kt = token / 16, ct = channel / 16, g = channel % 8, t = token % 8 / 2;
  const std::uint32_t j = (channel % 16 / 8) + 2 * (token % 16 / 8), e = token % 2;
  const std::uint32_t group = ct / 4, width = tiles - 4 * group < 4 ? tiles - 4 * group : 4;
  return {kt * tiles * 32 + group * 128 + (4 * g + t) * width + ct % 4, 16 * e + 4 * j};
}

// Index, in fp16 elements, of the scale or midpoint of item x of `count` (channel of d for K, token of 64 for V).
KVQ_HD constexpr std::uint32_t scale_index(std::uint32_t x, std::uint32_t count) {
  const std::uint32_t kt = x / 16, h = x % 16 / 8, t = x % 8 / 2, e = x % 2;
  const std::uint32_t pair = kt / 2, width = count / 16 - 2 * pair < 2 ? 1 : 2;
  return pair * 32 + ((t * width + kt % 2) * 2 + h) * 2 + e;
}

KVQ_HD constexpr std::uint32_t mid_index(std::uint32_t x, std::uint32_t count) {
  const std::uint32_t kt = x / 16, h = x % 16 / 8, t = x % 8 / 2, e = x % 2;
  const std::uint32_t pair = kt / 2, width = count / 16 - 2 * pair < 2 ? 1 : 2;
  return pair * 32 + ((t * 2 + h) * width + kt % 2) * 2 + e;
}

// --- one page ------------------------------------------------------------------------------------------------------

// One row of the layer table that a model registers. Plain data; also crosses the wire and the C ABI (kvq.h mirrors it).
struct LayerSpec {
  std::uint16_t kv_heads;
  std::uint16_t head_dim;
  Dtype dtype;
  std::uint8_t keep_dense;  // 1: this layer stays dense whatever the page's format (a format exception)

  friend constexpr bool operator==(const LayerSpec&, const LayerSpec&) = default;
};

struct ModelGeometry {
  std::uint32_t layers = 0;
  LayerSpec layer[kMaxLayers] = {};
};

constexpr bool operator==(const ModelGeometry& a, const ModelGeometry& b) {
  if (a.layers != b.layers) return false;
  for (std::uint32_t i = 0; i < a.layers; ++i) {
    if (!(a.layer[i] == b.layer[i])) return false;
  }
  return true;
}

// Where one layer's blocks are in a page: head h starts at offset_bytes + h * head_bytes.
struct LayerPlace {
  std::uint64_t offset_bytes;
  std::uint64_t head_bytes;
  Format format;  // the page's format, or dense for a layer that keeps dense
};

struct PageLayout {
  Format format = Format::none;
  std::uint64_t page_bytes = 0;  // size of a slot; a multiple of 256
  LayerPlace layer[kMaxLayers] = {};
};

constexpr PageLayout make_layout(const ModelGeometry& g, Format f) {
  PageLayout out;
  out.format = f;
  std::uint64_t at = 0;
  for (std::uint32_t i = 0; i < g.layers; ++i) {
    const LayerSpec& spec = g.layer[i];
    const Format lf = spec.keep_dense ? Format::dense : f;
    out.layer[i] = {at, block_bytes(lf, spec.head_dim), lf};
    at += out.layer[i].head_bytes * spec.kv_heads;
  }
  out.page_bytes = round_up(at, kOffsetUnitBytes);
  return out;
}

}  // namespace kvq
