// What one worker computes of an attention call: a tile of rows of some KV heads of one
// sequence, against a range of pages. Heads of a page are neighbours in memory, so an item takes several where it can.
//
// Invariant: plain data between attend.cc (checks, split, merge) and attend_simd.cc (arithmetic); every page in `pages`
// was checked, and its address stays valid while the caller's step is open.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host_kernels.h"

namespace kvq {

struct ResolvedPage {
  const std::byte* base;  // null: the null page, zeros
  Format format;          // of this layer inside the page
  std::uint64_t layer_offset, head_bytes;
};

// Row r of a sequence and KV head is query token r / group and query head kv_head * group + r % group.
struct AttendItem {
  const AttentionCall* call;
  const ResolvedPage* pages;  // of the sequence, from `first_page` on
  std::uint32_t first_page;
  std::uint32_t sequence, group;
  std::uint32_t kv_head, heads;   // the first one and how many; heads * rows <= kItemRows
  std::uint32_t first_row, rows;  // of each head; rows <= kRowTile
  std::uint32_t page_begin, page_end;
  float scale;     // never 0
  float* partial;  // null: finish into call->out; else heads * head_state_floats(), aligned to 64 bytes
};

inline constexpr std::uint32_t kRowTile = 16;   // queries, outputs and one part of a page share the first-level cache
inline constexpr std::uint32_t kItemRows = 64;  // rows of all heads of an item stay in the second-level cache

// One head's state: maxima[rows], sums[rows], then outputs[rows][d] from a cache line's start on.
inline std::size_t state_outputs(const AttendItem& item) { return round_up(2 * item.rows, 16); }
inline std::size_t head_state_floats(const AttendItem& item, std::uint32_t d) {
  return state_outputs(item) + std::size_t{item.rows} * d;
}

// Keys that a query at `position` sees, as [begin, end); empty when begin >= end.
struct Visible {
  std::int64_t begin, end;
};
inline Visible visible_keys(const AttentionCall& call, std::int64_t position, std::int64_t length) {
  const std::int64_t end = call.causal && position + 1 < length ? position + 1 : length;
  const std::int64_t begin = call.window >= 0 ? position - call.window + 1 : 0;
  return {begin > 0 ? begin : 0, end > 0 ? end : 0};
}

inline std::int64_t query_position(const AttentionCall& call, std::uint32_t sequence, std::int64_t token) {
  return std::int64_t{call.lengths[sequence]} -
         (std::int64_t{call.query_starts[sequence + 1]} - call.query_starts[sequence]) + token;
}

// Dispatched to the best instruction set of the machine.
void attend_item(const AttendItem& item);
// Writes the rows of `item` from states laid out like `partial`.
void finish_item(const AttendItem& item, const float* states);

}  // namespace kvq
