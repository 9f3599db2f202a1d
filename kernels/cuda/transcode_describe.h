// From a geometry and two layouts to what a launch of the transcoder works on.
//
// Invariant: check_pair() comes first; what passes it has blocks whose places fit into BatchWork's 32 bits.
#pragma once

#include <algorithm>

#include "kernels/cuda/transcode_batch.h"
#include "kvq/result.h"

namespace kvq::cuda {

inline constexpr std::uint32_t kChunkBytes = 16;

inline bool quantized(Format f) {
  return f == Format::int4 || f == Format::int4_k4 || f == Format::int4_k8 || f == Format::k8v4;
}

inline std::uint32_t divide_up(std::uint64_t amount, std::uint64_t by) {
  return static_cast<std::uint32_t>((amount + by - 1) / by);
}

// Whether `next` only continues `layer`.
inline bool alike(const LayerWork& layer, const LayerWork& next) {
  return layer.from_bytes == next.from_bytes && layer.to_bytes == next.to_bytes && layer.head_dim == next.head_dim &&
         layer.from == next.from && layer.to == next.to && layer.dtype == next.dtype;
}

inline Error check_pair(const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to) {
  if (geometry.layers == 0 || geometry.layers > kMaxLayers) return {Errc::wrong_layout, 0, "layer count is not 1..256"};
  for (const PageLayout* layout : {&from, to}) {
    if (layout != nullptr && layout->format != Format::dense && !quantized(layout->format)) {
      return {Errc::wrong_layout, 0, "page format is unknown"};
    }
  }
  if (to != nullptr && from.format != to->format && quantized(from.format) && quantized(to->format)) {
    return {Errc::invalid_argument, 0, "no transcode between two quantized formats"};
  }
  for (std::uint32_t i = 0; i < geometry.layers; ++i) {
    if (!head_dim_supported(geometry.layer[i].head_dim)) {
      return {Errc::wrong_layout, 0, "head_dim is not 64, 80, 96, 128, 192 or 256"};
    }
  }
  if (from.page_bytes >= std::uint64_t{1} << 33) return {Errc::wrong_layout, 0, "page is 8 GiB or larger"};
  return {};
}

// The table of layers that have blocks, and what is common to them. Returns how many entries that are.
inline std::uint32_t describe(const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to,
                              LayerWork* layers, BatchWork& batch) {
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < geometry.layers; ++i) {
    const LayerSpec& spec = geometry.layer[i];
    if (spec.kv_heads == 0) continue;
    const LayerPlace &a = from.layer[i], b = to == nullptr ? LayerPlace{0, 0, a.format} : to->layer[i];
    LayerWork work{};
    work.first_block = batch.blocks_per_page;
    work.from_chunk = static_cast<std::uint32_t>(a.offset_bytes / kChunkBytes);
    work.to_chunk = static_cast<std::uint32_t>(b.offset_bytes / kChunkBytes);
    work.from_bytes = static_cast<std::uint32_t>(a.head_bytes);
    work.to_bytes = static_cast<std::uint32_t>(b.head_bytes);
    work.head_dim = spec.head_dim;
    work.from = a.format;
    work.to = b.format;
    work.dtype = spec.dtype;
    if (count == 0 || !alike(layers[count - 1], work)) layers[count++] = work;
    batch.blocks_per_page += spec.kv_heads;
    batch.from_end_chunk = work.from_chunk + spec.kv_heads * (work.from_bytes / kChunkBytes);
    batch.to_end_chunk = work.to_chunk + spec.kv_heads * (work.to_bytes / kChunkBytes);
    batch.stage_bytes = std::max(batch.stage_bytes, work.from_bytes);
  }
  batch.layer_count = count;
  batch.from_chunks = static_cast<std::uint32_t>(from.page_bytes / kChunkBytes);
  batch.to_chunks = to == nullptr ? 0 : static_cast<std::uint32_t>(to->page_bytes / kChunkBytes);
  batch.sum_only = to == nullptr;
  return count;
}

}  // namespace kvq::cuda
