// The part of a call that leads from page numbers to blocks, checked and packed for the device.
//
// Invariant: a PageTable that comes from here has no null pointer that a kernel would follow.
#pragma once

#include "kernels/cuda/attend_params.h"
#include "kernels/page_lookup.h"

namespace kvq::cuda {

inline Error make_page_table(const ModelView& model, const PageSource& pages, std::uint32_t layer, const Launch& launch,
                             PageTable& out) {
  if (pages.entries == nullptr || pages.arena == nullptr) return {Errc::invalid_argument, 0, "page source is null"};
  if (reinterpret_cast<std::uintptr_t>(pages.arena) % 128 != 0) {
    return {Errc::invalid_argument, 0, "arena is not aligned to 128 bytes"};
  }
  if (launch.fault == nullptr) return {Errc::invalid_argument, 0, "fault word is null"};
  out = {};
  out.entries = reinterpret_cast<const std::uint64_t*>(pages.entries);
  out.arena = reinterpret_cast<std::uint64_t>(pages.arena);
  out.aliases = launch.aliases;
  out.fault = launch.fault;
  out.capacity = pages.capacity;
  out.alias_count = launch.alias_count;
  out.layer = layer;
  for (std::uint32_t f = 1; f < kFormatCount; ++f) {
    LayerPlace place{};
    if (!find_place(model, static_cast<Format>(f), layer, place)) continue;
    out.formats[f] = {place.offset_bytes, static_cast<std::uint32_t>(place.head_bytes), place.format};
  }
  return {};
}

}  // namespace kvq::cuda
