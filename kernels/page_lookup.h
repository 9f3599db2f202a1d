// A page id to a directory entry, with the errors that a reader can meet.
//
// Invariant: one acquire load per page; what it returns stays valid until the caller's step ends.
#pragma once

#include <cmath>

#include "kernels/host_kernels.h"
#include "kvq/step_protocol.h"

namespace kvq {

// Ids come from callers, so they are checked as signed 64-bit. On success `entry.state` is open, sealed or null.
inline Error lookup_page(const PageSource& pages, std::int64_t id, Entry& entry) {
  if (id == 0) {
    entry = Entry{0, Format::none, EntryState::null, 0};
    return {};
  }
  if (id < 0 || id >= pages.capacity) return {Errc::stale_id, 0, "page id is outside the directory"};
  entry = unpack_entry(load_entry<SharedMemory>(pages.entries[id]));
  switch (entry.state) {
    case EntryState::open:
    case EntryState::sealed:
    case EntryState::null:
      return {};
    case EntryState::free:
      return {Errc::stale_id, 0, "page is free"};
    case EntryState::host:
      return {Errc::lost_page, 0, "page is in host memory; restore it first"};
    case EntryState::lost:
      break;
  }
  return {Errc::lost_page, 0, "page content is lost"};
}

// Whether `format` has a layout in `model`; then `place` is that of `layer`.
inline bool find_place(const ModelView& model, Format format, std::uint32_t layer, LayerPlace& place) {
  const std::uint32_t index = static_cast<std::uint32_t>(format);
  if (format == Format::none || index >= kFormatCount || model.layouts[index].format != format) return false;
  place = model.layouts[index].layer[layer];
  return true;
}

inline Error check_model(const ModelView& model, std::uint32_t layer) {
  if (model.geometry == nullptr || model.layouts == nullptr) return {Errc::invalid_argument, 0, "model is null"};
  if (layer >= model.geometry->layers || layer >= kMaxLayers) {
    return {Errc::invalid_argument, 0, "layer is outside the model"};
  }
  const LayerSpec& spec = model.geometry->layer[layer];
  if (!head_dim_supported(spec.head_dim)) return {Errc::wrong_layout, 0, "head_dim is not 64, 80, 96, 128, 192 or 256"};
  if (spec.kv_heads == 0) return {Errc::wrong_layout, 0, "layer has no KV heads"};
  return {};
}

// What any device can refuse of an attention call without its arrays' contents: shapes, types and numbers.
inline Error check_attention(const AttentionCall& call) {
  const auto refuse = [](const char* why) { return Error{Errc::invalid_argument, 0, why}; };
  if (Error error = check_model(call.model, call.layer); error.code != Errc::ok) return error;
  const LayerSpec& spec = call.model.geometry->layer[call.layer];
  if (call.query_heads == 0 || call.query_heads % spec.kv_heads != 0) {
    return refuse("query_heads is not a multiple of the layer's KV heads");
  }
  if (call.query_heads / spec.kv_heads > kMaxGroup) return refuse("more than 16 query heads per KV head");
  if (static_cast<std::uint32_t>(call.q_type) > 2) return refuse("q_type is unknown");
  if (static_cast<std::uint32_t>(call.out_type) > 2) return refuse("out_type is unknown");
  if (!std::isfinite(call.scale)) return refuse("scale is not finite");
  if (!std::isfinite(call.softcap) || call.softcap < 0) return refuse("softcap is negative or not finite");
  if (call.window < -1 || call.window == 0) return refuse("window is neither -1 nor positive");
  if (call.batch != 0 && (call.lengths == nullptr || call.query_starts == nullptr)) {
    return refuse("lengths or query_starts is null");
  }
  return {};
}

}  // namespace kvq
