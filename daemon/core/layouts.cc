// Computes each format's layout once, when a geometry is registered.
#include "daemon/core/layouts.h"

#include <atomic>

namespace kvq {

Layouts::Layouts(std::span<ModelRecord> records) : records_(records), layouts_(records.size()) {
  for (std::uint16_t i = 1; i < records_.size(); ++i) {
    if (records_[i].live != 0) make_layouts(i);
  }
}

void Layouts::put(std::uint16_t model, const ModelGeometry& geometry) {
  records_[model].live = 0;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  records_[model].geometry = geometry;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  records_[model].live = 1;
  make_layouts(model);
}

void Layouts::make_layouts(std::uint16_t model) {
  const ModelGeometry& geometry = records_[model].geometry;
  layouts_[model] = std::make_unique<PageLayout[]>(kFormatCount);
  for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts_[model][f] = make_layout(geometry, static_cast<Format>(f));
}

Error check_geometry(const ModelGeometry& geometry, std::uint64_t slab_bytes) {
  if (geometry.layers == 0 || geometry.layers > kMaxLayers) return {Errc::wrong_layout, 0, "layers: 1 to 256"};
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < geometry.layers; ++i) {
    const LayerSpec& layer = geometry.layer[i];
    if (layer.kv_heads == 0) return {Errc::wrong_layout, 0, "a layer without KV heads"};
    if (!head_dim_supported(layer.head_dim)) {
      return {Errc::wrong_layout, 0, "head_dim: 64, 80, 96, 128, 192 or 256"};
    }
    if (layer.dtype != Dtype::fp16 && layer.dtype != Dtype::bf16) return {Errc::wrong_layout, 0, "dtype: fp16 or bf16"};
    bytes += layer.kv_heads * block_bytes(Format::dense, layer.head_dim);
  }
  if (round_up(bytes, kOffsetUnitBytes) > slab_bytes) {
    return {Errc::wrong_layout, 0, "a dense page of this model is larger than a slab: raise the daemon's slab size"};
  }
  return {};
}

}  // namespace kvq
