// What an attention call becomes on its way to the device, and the fixed shape of its launch.
//
// Invariant: plain data, passed by value; all that depends on lengths is read on the device. A *unit* is one warp with
// an equal, contiguous share of the work; a *tile* is kRows rows of one (sequence, KV head), row r being query token r
// / group and query head kv_head * group + r % group. Warps of a block that share a tile join their states in the
// block, of blocks that share one the last joins what all have left. Many rows have kernels of their own
// (prefill_kernel.cuh).
#pragma once

#include <cstdint>

#include "kernels/cuda/cuda_kernels.h"

namespace kvq::cuda {

inline constexpr std::uint32_t kMaxStages = 4;  // of a warp's ring
inline constexpr std::uint32_t kMaxBlocks = 255;
// Tiles of 8 rows that share each decoded fragment when there are few rows and many; more are beyond the registers.
inline constexpr std::uint32_t kNarrowTiles = 1, kWideTiles = 2;
// Warps of a block, of which there is one per multiprocessor: as many as have registers enough. A page of a small head
// is little work with as many waits.
KVQ_HD constexpr std::uint32_t block_warps(std::uint32_t d, std::uint32_t tiles) {
  return d <= 64 && tiles == kNarrowTiles ? 12 : 8;
}
inline constexpr std::uint32_t kMaxWarps = block_warps(64, kNarrowTiles);
// Whether k8v4 pages come in two pieces, keys and values, since there is no room for two whole ones; GPUs before Hopper
// have less.
KVQ_HD constexpr bool halves_pages(std::uint32_t tiles, std::uint32_t d, bool hopper) {
  return tiles != kNarrowTiles || d > 128 || !hopper;
}
// Whether registers hold the queries for quantized pages (query_tile.cuh).
KVQ_HD constexpr bool holds_codes(std::uint32_t tiles, std::uint32_t d) { return tiles == kNarrowTiles && d <= 128; }
inline constexpr std::uint32_t kStaticBytes = 512;  // of a block's shared memory, beside rings and queries

// Where a format's block of this layer lies in a page; `format` is none where the model has no such layout.
struct LayerFormat {
  std::uint64_t offset_bytes;
  std::uint32_t head_bytes;
  Format format;
};

// How a device array of page numbers leads to blocks. Shared by append and attend.
struct PageTable {
  const std::uint64_t* entries;
  std::uint64_t arena;
  const std::int32_t* aliases;
  std::uint64_t* fault;
  std::uint32_t capacity, alias_count, layer;
  LayerFormat formats[kFormatCount];
};

inline constexpr std::uint32_t kNoUnit = 0xffffffffu;

// Of kernels for many rows: the tile that begins in a unit and goes on behind it. The units from it on have a partial
// state of it each, in place 1; unit `end_unit` has another in place 0.
struct UnitTail {
  std::uint32_t blocks;    // 0: no such tile
  std::uint32_t end_unit;  // kNoUnit: none
  std::uint32_t sequence, head, first_row, rows;
};

struct AttendParams {
  PageTable pages;
  const std::int32_t* tables;
  std::int64_t table_stride;
  const std::int32_t* lengths;
  const std::int32_t* query_starts;
  std::uint32_t batch, kv_heads, group;

  const void* q;
  std::int64_t q_token_stride, q_head_stride;
  void* out;
  std::int64_t out_token_stride, out_head_stride;
  float* lse;
  Real q_type, out_type;

  float scale_log2;    // scale * log2(e): scores are exponents of two
  float softcap_log2;  // 0: none
  const float* alibi;
  const float* sinks;
  std::int32_t window;  // -1: none
  bool causal;

  unsigned long long* arrivals;  // [blocks]
  float* partials;               // [blocks][2][kRows][d + 2]
  float* early;                  // [units][kRows][d + 2]: tiles that end in a unit that goes on, and began before it
  UnitTail* tails;               // [units] for many rows, in place of arrivals and early
  std::uint32_t stages, slot_bytes, query_bytes;  // of each warp
  bool has_rest;                                  // queries have a plane of what dense pages' type does not hold
};

}  // namespace kvq::cuda
