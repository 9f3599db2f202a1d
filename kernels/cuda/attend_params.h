// What an attention call becomes on its way to the device, and the fixed shape of its launch.
//
// Invariant: plain data, passed by value; all that depends on lengths is read on the device. A *unit* is one warp with
// an equal, contiguous share of the work; a *tile* is kRows rows of one (sequence, KV head), row r being query token r
// / group and query head kv_head * group + r % group. Warps of a block that share a tile join their states in the
// block, blocks that share one leave partial states that `combine` joins.
#pragma once

#include <cstdint>

#include "kernels/cuda/cuda_kernels.h"

namespace kvq::cuda {

inline constexpr std::uint32_t kMaxWarps = 8;        // of a block; one block per multiprocessor
inline constexpr std::uint32_t kMaxStages = 4;       // of a warp's ring
inline constexpr std::uint32_t kStaticBytes = 3072;  // of a block's shared memory, beside rings and queries
inline constexpr std::uint32_t kNarrowTiles = 1;
// Tiles of 8 rows that share each decoded fragment when there are many rows; what the registers hold.
KVQ_HD constexpr std::uint32_t wide_tiles(std::uint32_t d) { return d <= 80 ? 4 : 2; }

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

// The tile that begins in a unit and goes on behind the unit's block: where its partial states are. The blocks from the
// unit's own on have one each for it, place 1 of the unit itself and then of each block's first unit; unit `end_unit`
// has another in place 0.
struct UnitTail {
  std::uint32_t blocks;    // 0: no such tile
  std::uint32_t end_unit;  // kNoUnit: none
  std::uint32_t sequence, head, first_row, rows;
};
inline constexpr std::uint32_t kNoUnit = 0xffffffffu;

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

  UnitTail* tails;  // [units]
  float* partials;  // [units][2][kRows][d + 2]
  std::uint32_t stages, slot_bytes, planes;
};

}  // namespace kvq::cuda
