// Attention's front on the device: checks what the host can know, chooses the kernel and the shape of its launch.
//
// Invariant: grid, workspace and shared memory follow from the device, the model and the call's types alone, so a
// captured launch stays right for any later lengths.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attend_variants.h"
#include "kernels/cuda/combine.cuh"
#include "kernels/cuda/device_info.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/page_table.h"
#include "kernels/cuda/prefill_shape.h"

namespace kvq::cuda {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr std::int32_t kEndlessWindow = 1
                                        << 30;  // longer than any sequence; smaller ones keep positions within 32 bits

Error refuse(const char* why) { return {Errc::invalid_argument, 0, why}; }

Error check_call(const AttentionCall& call) {
  if (Error error = check_attention(call); error.code != Errc::ok) return error;
  if (call.batch == 0) return {};
  if (call.q == nullptr || call.out == nullptr) return refuse("q or out is null");
  if (call.block_tables == nullptr) return refuse("block_tables is null");
  return {};
}

std::uint32_t tile_rows(bool wide) { return 8 * (wide ? kWideTiles : kNarrowTiles); }

std::uint32_t blocks_of(const DeviceInfo& device) { return std::min(device.multiprocessors, kMaxBlocks); }

std::size_t arrivals_bytes(const DeviceInfo& device) { return round_up(blocks_of(device) * 8, 256); }

std::size_t tails_bytes(std::uint32_t units) { return round_up(units * sizeof(UnitTail), 256); }

std::size_t layer_workspace(const DeviceInfo& device, std::uint32_t d) {
  const std::size_t blocks = blocks_of(device), row_bytes = (d + 2) * sizeof(float);
  const std::size_t few = arrivals_bytes(device) + blocks * (2 + kMaxWarps) * tile_rows(true) * row_bytes;
  const std::size_t many =
      tails_bytes(device.multiprocessors) + device.multiprocessors * 2 * prefill_rows(true) * row_bytes;
  return std::max(few, many);
}

// How a multiprocessor's shared memory is divided.
struct Shape {
  std::uint32_t warps = 0, stages = 2, slot_bytes = 0, query_bytes = 0, shared_bytes = 0;
  bool has_rest = false;
};

Shape choose_shape(const DeviceInfo& device, const PageTable& pages, const LayerSpec& spec, Real q_type, bool wide) {
  const std::uint32_t d = spec.head_dim, tiles = wide ? kWideTiles : kNarrowTiles;
  Shape shape;
  shape.slot_bytes = kPageTokens * d;  // a quarter of a dense block; two hold a tile's outputs
  shape.slot_bytes = std::max(shape.slot_bytes, static_cast<std::uint32_t>(round_up(8 * tiles * (d + 6) * 2, 128)));
  for (const LayerFormat& format : pages.formats) {
    if (format.format == Format::none || format.format == Format::dense) continue;
    const bool halves = format.format == Format::k8v4 && halves_pages(tiles, d, device.major >= 9);
    shape.slot_bytes = std::max(shape.slot_bytes, halves ? block_offsets(Format::k8v4, d).v : format.head_bytes);
  }
  shape.has_rest = spec.dtype == Dtype::fp16 ? q_type == Real::fp32 : q_type != Real::bf16;
  const std::uint32_t planes = 1 + (spec.dtype == Dtype::bf16 && !holds_codes(tiles, d)) + shape.has_rest;
  shape.query_bytes = planes * tiles * ((d / 16 + 1) / 2) * 512;
  const auto bytes = [&](std::uint32_t warps, std::uint32_t stages) {
    return warps * (stages * shape.slot_bytes + shape.query_bytes + kMaxStages * 8);
  };
  const std::uint32_t room = device.shared_bytes - kStaticBytes;
  shape.warps = block_warps(d, tiles);
  while (shape.warps > 0 && bytes(shape.warps, shape.stages) > room) --shape.warps;
  while (shape.stages < kMaxStages && bytes(shape.warps, shape.stages + 1) <= room) ++shape.stages;
  // More than half, so that a block of the next call never joins one of this on its multiprocessor.
  shape.shared_bytes = std::max(bytes(shape.warps, shape.stages), room / 2 + 1);
  return shape;
}

AttendParams make_params(const AttentionCall& call, const LayerSpec& spec, const Shape& shape) {
  AttendParams p{};
  p.tables = call.block_tables;
  p.table_stride = call.block_table_stride;
  p.lengths = call.lengths;
  p.query_starts = call.query_starts;
  p.batch = call.batch;
  p.kv_heads = spec.kv_heads;
  p.group = call.query_heads / spec.kv_heads;
  p.q = call.q;
  p.q_token_stride = call.q_token_stride, p.q_head_stride = call.q_head_stride;
  p.out = call.out;
  p.out_token_stride = call.out_token_stride, p.out_head_stride = call.out_head_stride;
  p.lse = call.lse;
  p.q_type = call.q_type, p.out_type = call.out_type;
  p.scale_log2 = (call.scale != 0 ? call.scale : 1.0f / std::sqrt(static_cast<float>(spec.head_dim))) * kLog2E;
  p.softcap_log2 = call.softcap * kLog2E;
  p.alibi = call.alibi;
  p.sinks = call.sinks;
  p.window = call.window < kEndlessWindow ? call.window : -1;
  p.causal = call.causal;
  p.stages = shape.stages, p.slot_bytes = shape.slot_bytes, p.query_bytes = shape.query_bytes;
  p.has_rest = shape.has_rest;
  return p;
}

// The kernel for many query rows, where the device and the call are such that there is one; else null. Its units are
// blocks, so that this shape has one warp.
PrefillKernel choose_prefill(const DeviceInfo& device, const PageTable& pages, const AttentionCall& call,
                             std::uint64_t likely_rows, Shape& shape, std::uint32_t& rows) {
  const LayerSpec& spec = call.model.geometry->layer[call.layer];
  const bool same_type = static_cast<std::uint32_t>(call.q_type) == static_cast<std::uint32_t>(spec.dtype);
  if (!kHasWarpgroups || device.major != 9 || !same_type) return nullptr;
  if ((spec.head_dim != 64 && spec.head_dim != 128) || likely_rows <= kFewRows) return nullptr;
  const bool many = likely_rows > kGroupRows;
  shape.slot_bytes = 128;
  for (const LayerFormat& format : pages.formats) {
    if (format.format != Format::none && format.format != Format::dense) {
      shape.slot_bytes = std::max(shape.slot_bytes, format.head_bytes);
    }
  }
  const std::uint32_t taken = prefill_ring_at(spec.head_dim, many);
  if (device.shared_bytes < taken + 3 * shape.slot_bytes) return nullptr;
  shape.warps = 1;
  shape.stages = std::min(kMaxRawSlots, (device.shared_bytes - taken) / shape.slot_bytes);
  shape.shared_bytes = taken + shape.stages * shape.slot_bytes;
  rows = prefill_rows(many);
  const PrefillVariant variant{spec.dtype, many, call.softcap == 0 && call.alibi == nullptr};
  return spec.head_dim == 64 ? prefill_d64(variant) : prefill_d128(variant);
}

// Blocks of many rows leave partial states that a second kernel joins.
Error launch_prefill(const DeviceInfo& device, const Launch& launch, PrefillKernel kernel, const Shape& shape,
                     std::uint32_t rows, std::uint32_t likely_rows, std::uint32_t d, AttendParams p) {
  const std::uint32_t units = device.multiprocessors;
  p.tails = static_cast<UnitTail*>(launch.workspace);
  p.partials = reinterpret_cast<float*>(static_cast<std::byte*>(launch.workspace) + tails_bytes(units));
  const Error error = launch_early(device, launch.stream, {units, 1, 1}, prefill_threads(rows > kGroupRows),
                                   shape.shared_bytes, "attend, the launch for many rows", kernel, p);
  if (error.code != Errc::ok) return error;
  return launch_early(device, launch.stream,
                      {(units + kCombineUnits - 1) / kCombineUnits, std::min(rows, likely_rows), 1}, kCombineUnits * 32,
                      0, "attend, the launch that joins", combine_kernel, p, units, shape.warps, rows, d);
}

Error launch_attend(const DeviceInfo& device, const Launch& launch, AttendKernel kernel, const Shape& shape,
                    std::uint32_t rows, std::uint32_t d, AttendParams p) {
  const std::uint32_t blocks = blocks_of(device);
  p.arrivals = static_cast<unsigned long long*>(launch.workspace);
  p.partials = reinterpret_cast<float*>(static_cast<std::byte*>(launch.workspace) + arrivals_bytes(device));
  p.early = p.partials + std::size_t{blocks} * 2 * partial_floats(rows, d);
  return launch_early(device, launch.stream, {blocks, 1, 1}, shape.warps * 32, shape.shared_bytes, "attend, the launch",
                      kernel, p);
}

}  // namespace

Result<std::size_t> workspace_bytes(const ModelView& model, std::uint32_t query_heads) {
  if (model.geometry == nullptr) return Error{Errc::invalid_argument, 0, "model is null"};
  const Result<DeviceInfo> device = current_device();
  if (!device) return device.error();
  std::size_t most = 0;
  for (std::uint32_t layer = 0; layer < model.geometry->layers; ++layer) {
    const LayerSpec& spec = model.geometry->layer[layer];
    if (Error error = check_model(model, layer); error.code != Errc::ok) return error;
    if (query_heads == 0 || query_heads % spec.kv_heads != 0) {
      return Error{Errc::wrong_layout, 0, "query_heads is not a multiple of a layer's KV heads"};
    }
    most = std::max(most, layer_workspace(*device, spec.head_dim));
  }
  return most;
}

Result<void> attend(const AttentionCall& call, const Launch& launch) {
  if (Error error = check_call(call); error.code != Errc::ok) return error;
  if (call.batch == 0) return {};
  const Result<DeviceInfo> device = current_device();
  if (!device) return device.error();
  const LayerSpec& spec = call.model.geometry->layer[call.layer];
  const std::uint32_t d = spec.head_dim, group = call.query_heads / spec.kv_heads;
  if (launch.workspace == nullptr || launch.workspace_bytes < layer_workspace(*device, d)) {
    return refuse("workspace is null or smaller than workspace_bytes()");
  }
  if (reinterpret_cast<std::uintptr_t>(launch.workspace) % 256 != 0)
    return refuse("workspace is not aligned to 256 bytes");
  PageTable pages;
  if (Error error = make_page_table(call.model, call.pages, call.layer, launch, pages); error.code != Errc::ok) {
    return error;
  }
  const std::uint64_t likely_rows = std::uint64_t{launch.max_query_tokens} * group;
  const bool wide = likely_rows == 0 || likely_rows > 8 * kNarrowTiles;
  Shape shape;
  std::uint32_t rows = tile_rows(wide);
  const PrefillKernel prefill = choose_prefill(*device, pages, call, likely_rows, shape, rows);
  const AttendKernel kernel =
      prefill != nullptr ? nullptr : find_kernel(d, {spec.dtype, wide, call.softcap == 0 && call.alibi == nullptr});
  if (prefill == nullptr) {
    if (kernel == nullptr) return Error{Errc::wrong_layout, 0, "no kernel for this head_dim in this build"};
    shape = choose_shape(*device, pages, spec, call.q_type, wide);
    if (shape.warps == 0) return Error{Errc::system, 0, "device has too little shared memory for this head_dim"};
  }
  AttendParams p = make_params(call, spec, shape);
  p.pages = pages;
  const Error error = prefill != nullptr
                          ? launch_prefill(*device, launch, prefill, shape, rows,
                                           static_cast<std::uint32_t>(std::min<std::uint64_t>(likely_rows, rows)), d, p)
                          : launch_attend(*device, launch, kernel, shape, rows, d, p);
  if (error.code != Errc::ok) return error;
  return {};
}

}  // namespace kvq::cuda
