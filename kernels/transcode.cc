// Rewriting pages: which block goes where, and what may not be rewritten.
//
// Invariant: `src` is only read; a refused page leaves nothing that anyone may use in `dst`.
#include <cstring>

#include "kernels/int4_codec.h"
#include "kernels/page_lookup.h"
#include "kernels/targets.h"
#include "kernels/transcode_block.h"

namespace kvq {
namespace {

bool quantized(Format f) {
  return f == Format::int4 || f == Format::int4_k4 || f == Format::int4_k8 || f == Format::k8v4;
}

Error check_layouts(const ModelGeometry& geometry, const PageLayout& from, const PageLayout& to) {
  if (!has_vector_unit()) return {Errc::system, 0, "CPU has no supported vector instructions (SSSE3 at least)"};
  if (geometry.layers == 0 || geometry.layers > kMaxLayers) return {Errc::wrong_layout, 0, "layer count is not 1..256"};
  for (const PageLayout* layout : {&from, &to}) {
    if (layout->format != Format::dense && !quantized(layout->format)) {
      return {Errc::wrong_layout, 0, "page format is unknown"};
    }
  }
  if (from.format != to.format && quantized(from.format) && quantized(to.format)) {
    return {Errc::invalid_argument, 0, "no transcode between two quantized formats"};
  }
  for (std::uint32_t i = 0; i < geometry.layers; ++i) {
    if (!head_dim_supported(geometry.layer[i].head_dim)) {
      return {Errc::wrong_layout, 0, "head_dim is not 64, 80, 96, 128, 192 or 256"};
    }
  }
  return {};
}

}  // namespace

Result<void> quantize_block(Format format, std::uint32_t head_dim, Dtype dtype, const std::byte* dense,
                            std::byte* out) {
  const std::size_t elements = std::size_t{2} * kPageTokens * head_dim;
  const std::uint16_t largest = largest_pattern(reinterpret_cast<const std::uint16_t*>(dense), elements);
  if (largest >= infinity_bits(dtype)) return Error{Errc::invalid_argument, 0, "page holds a value that is not finite"};
  if (largest > largest_bits(dtype)) return Error{Errc::invalid_argument, 0, "page holds a value beyond fp16"};
  quantize(format, head_dim, dtype, dense, out);
  return {};
}

void dequantize_block(Format format, std::uint32_t head_dim, Dtype dtype, const std::byte* block, std::byte* dense) {
  dequantize(format, head_dim, dtype, block, dense);
}

Result<void> transcode_page(const ModelGeometry& geometry, const PageLayout& from, const std::byte* src,
                            const PageLayout& to, std::byte* dst) {
  if (Error error = check_layouts(geometry, from, to); error.code != Errc::ok) return error;
  std::uint64_t written = 0;
  for (std::uint32_t i = 0; i < geometry.layers; ++i) {
    const LayerSpec& spec = geometry.layer[i];
    const LayerPlace& a = from.layer[i];
    const LayerPlace& b = to.layer[i];
    for (std::uint32_t head = 0; head < spec.kv_heads; ++head) {
      const std::byte* in = src + a.offset_bytes + head * a.head_bytes;
      std::byte* out = dst + b.offset_bytes + head * b.head_bytes;
      if (a.format == b.format) {
        std::memcpy(out, in, a.head_bytes);
      } else if (b.format == Format::dense) {
        dequantize_block(a.format, spec.head_dim, spec.dtype, in, out);
      } else if (Result<void> done = quantize_block(b.format, spec.head_dim, spec.dtype, in, out); !done) {
        return done;
      }
    }
    written = b.offset_bytes + b.head_bytes * spec.kv_heads;
  }
  std::memset(dst + written, 0, to.page_bytes - written);
  return {};
}

}  // namespace kvq
