// Writes new tokens into open pages.
//
// Invariant: all slots are checked before the first byte is written, and only the named tokens' rows of open dense
// pages are written; everything else in the arena stays as it is.
#include <cstring>

#include "kernels/host_kernels.h"
#include "kernels/page_lookup.h"

namespace kvq {
namespace {

// Where one token goes; null when it is swallowed.
Error find_target(const AppendCall& call, std::int64_t slot, std::byte*& layer_base) {
  layer_base = nullptr;
  if (slot == kNoSlot) return {};
  if (slot < 0) return {Errc::invalid_argument, 0, "slot is negative"};
  Entry entry{};
  if (Error error = lookup_page(call.pages, slot / kPageTokens, entry); error.code != Errc::ok) return error;
  if (entry.state != EntryState::open) return {};  // the null page and sealed pages swallow it
  if (entry.format != Format::dense) return {Errc::wrong_layout, 0, "open page is not dense"};
  LayerPlace place{};
  if (!find_place(call.model, Format::dense, call.layer, place)) {
    return {Errc::wrong_layout, 0, "model has no dense layout"};
  }
  layer_base = call.pages.arena + entry.offset_bytes + place.offset_bytes;
  return {};
}

void write_row(const std::uint16_t* src, std::uint16_t* part, std::uint32_t position, std::uint32_t d) {
  for (std::uint32_t c = 0; c < d / 8; ++c) {
    std::memcpy(part + position * d + dense_chunk(position, c, d) * 8, src + c * 8, 16);
  }
}

}  // namespace

Result<void> append(const AppendCall& call) {
  if (Error error = check_model(call.model, call.layer); error.code != Errc::ok) return error;
  const LayerSpec& spec = call.model.geometry->layer[call.layer];
  if (call.dtype != spec.dtype) return Error{Errc::wrong_layout, 0, "dtype is not the layer's"};
  if (call.tokens == 0) return {};
  if (call.slots == nullptr) return Error{Errc::invalid_argument, 0, "slots is null"};
  if (call.pages.entries == nullptr || call.pages.arena == nullptr) {
    return Error{Errc::invalid_argument, 0, "page source is null"};
  }
  std::byte* base = nullptr;
  for (std::uint32_t i = 0; i < call.tokens; ++i) {
    if (Error error = find_target(call, call.slots[i], base); error.code != Errc::ok) return error;
  }
  const std::uint32_t d = spec.head_dim;
  const std::uint64_t head_bytes = block_bytes(Format::dense, d);
  for (std::uint32_t i = 0; i < call.tokens; ++i) {
    // The daemon may seal between the two looks only what the session has committed; then it is swallowed here.
    if (find_target(call, call.slots[i], base).code != Errc::ok || base == nullptr) continue;
    const std::uint32_t position = static_cast<std::uint32_t>(call.slots[i] % kPageTokens);
    for (std::uint32_t head = 0; head < spec.kv_heads; ++head) {
      auto* part = reinterpret_cast<std::uint16_t*>(base + head * head_bytes);
      const std::int64_t k_at = i * call.k_token_stride + head * call.k_head_stride;
      const std::int64_t v_at = i * call.v_token_stride + head * call.v_head_stride;
      if (call.k != nullptr) write_row(static_cast<const std::uint16_t*>(call.k) + k_at, part, position, d);
      if (call.v != nullptr) {
        write_row(static_cast<const std::uint16_t*>(call.v) + v_at, part + kPageTokens * d, position, d);
      }
    }
  }
  return {};
}

}  // namespace kvq
