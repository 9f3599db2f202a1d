// How the work of a call is cut into equal shares, found by every warp for itself from the lengths on the device.
//
// Invariant: the work is one line of positions, in the order (sequence, KV head, tile, page); each tile has as many
// positions as the pages that any tile of its sequence can see, at least one, so that all rows are written. Unit u owns
// the positions [unit_begin(u), unit_begin(u + 1)). Nothing is stored: grid and workspace do not depend on batch or
// lengths. Everything is read past the first-level cache, since a kernel looks twice (attend_kernel.cuh).
#pragma once

#include "kernels/cuda/attend_params.h"
#include "kernels/cuda/mma.cuh"

namespace kvq::cuda {

// The hardware divides 32 bits far sooner, and nearly all counts fit.
__device__ inline std::uint64_t divide(std::uint64_t a, std::uint64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

// Whole positions for each unit; the last units get fewer or none. No unit has more than with finer shares, and tiles
// of round lengths end where units do.
struct Shares {
  std::uint64_t total, each;

  __device__ static Shares of(std::uint64_t total, std::uint32_t units) {
    return {total, total == 0 ? 1 : divide(total - 1, units) + 1};
  }
  __device__ std::uint64_t unit_begin(std::uint32_t unit) const { return min(unit * each, total); }
  __device__ std::uint32_t unit_of(std::uint64_t position) const {
    return static_cast<std::uint32_t>(divide(position, each));
  }
};

// One sequence as the schedule sees it.
struct Sequence {
  std::int32_t length, queries, first_query;
  std::uint32_t tiles;  // of each KV head; 0: no rows
  std::uint32_t cost;   // positions of each tile
};

template <std::uint32_t kRows>
__device__ inline Sequence read_sequence(const AttendParams& p, std::uint32_t s) {
  if (s >= p.batch) return {0, 0, 0, 0, 0};
  Sequence q;
  q.length = max(0, __ldcg(p.lengths + s));
  q.first_query = __ldcg(p.query_starts + s);
  q.queries = max(0, __ldcg(p.query_starts + s + 1) - q.first_query);
  q.tiles =
      static_cast<std::uint32_t>((std::uint64_t{static_cast<std::uint32_t>(q.queries)} * p.group + kRows - 1) / kRows);
  std::int64_t keys = q.length;
  if (p.window >= 0) {
    // A tile's queries are neighbours; without a causal limit its first one sees everything behind it as well.
    const std::int64_t span = p.causal ? (kRows - 1) / p.group + 1 : q.queries;
    keys = min(keys, std::int64_t{p.window} + span + kPageTokens - 1);
  }
  q.cost = max(1u, static_cast<std::uint32_t>((keys + kPageTokens - 1) / kPageTokens));
  return q;
}

__device__ inline std::uint64_t sequence_work(const AttendParams& p, const Sequence& q) {
  return std::uint64_t{p.kv_heads} * q.tiles * q.cost;
}

__device__ inline std::uint64_t sum_over_warp(std::uint64_t x) {
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// All positions of the call. Lanes take sequences in turn; `mine` is what a lane has read of the first 32.
template <std::uint32_t kRows>
__device__ inline std::uint64_t total_work(const AttendParams& p, const Sequence& mine, std::uint32_t lane) {
  std::uint64_t sum = sequence_work(p, mine);
#pragma unroll 1
  for (std::uint32_t s = lane + 32; s < p.batch; s += 32) sum += sequence_work(p, read_sequence<kRows>(p, s));
  return sum_over_warp(sum);
}

// Stands for all that the schedule reads: another sum means other lengths or queries, the same sum the same (but for
// one in 2^64).
__device__ inline std::uint64_t schedule_sum(const AttendParams& p, std::uint32_t lane) {
  std::uint64_t sum = 0;
#pragma unroll 1
  for (std::uint32_t s = lane; s < p.batch; s += 32) {
    const auto length = static_cast<std::uint32_t>(__ldcg(p.lengths + s));
    const auto start = static_cast<std::uint32_t>(__ldcg(p.query_starts + s + 1));
    std::uint64_t x = ((std::uint64_t{length} << 32) | start) + (s + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
    sum += x ^ (x >> 29);
  }
  return sum_over_warp(sum) + static_cast<std::uint32_t>(__ldcg(p.query_starts));
}

// The lane whose share of `work` has `position`, all lanes' shares being one line from `before` on; -1: it lies behind
// them. `before` becomes where the share, or what lies behind, begins.
__device__ inline int lane_of(std::uint64_t work, std::uint64_t position, std::uint64_t& before) {
  std::uint64_t end = work;
  for (std::uint32_t step = 1; step < 32; step <<= 1) {
    const std::uint64_t other = __shfl_up_sync(kAllLanes, end, step);
    if (threadIdx.x % 32 >= step) end += other;
  }
  end += before;
  const unsigned beyond = __ballot_sync(kAllLanes, end > position);
  const int found = __ffs(static_cast<int>(beyond)) - 1;
  before = __shfl_sync(kAllLanes, beyond != 0 ? end - work : end, beyond != 0 ? found : 31);
  return found;
}

// A stretch of one tile: pages [page_begin, page_end) of it are this unit's.
struct Piece {
  std::uint32_t sequence, head, tile;
  std::uint32_t page_begin, page_end;
  bool begins, ends;  // whether the tile's first and last positions are in it
};

// Walks the pieces of one unit, in order.
template <std::uint32_t kRows>
struct Cursor {
  std::uint64_t left;  // positions that the unit still has
  std::uint32_t sequence, head, tile, offset;
  Sequence now;

  // Stands at `position`; all lanes search together, 32 sequences at a time. `mine` as for total_work().
  __device__ void seek(const AttendParams& p, Sequence mine, std::uint64_t position, std::uint64_t count,
                       std::uint32_t lane) {
    left = count;
    sequence = head = tile = offset = 0;
    now.tiles = 0;
    if (count == 0) return;
    std::uint64_t before = 0;
#pragma unroll 1
    for (std::uint32_t first = 0; first < p.batch; first += 32) {
      if (first != 0) mine = read_sequence<kRows>(p, first + lane);
      const int found = lane_of(sequence_work(p, mine), position, before);
      if (found < 0) continue;
      sequence = first + static_cast<std::uint32_t>(found);
      now.length = __shfl_sync(kAllLanes, mine.length, found);
      now.queries = __shfl_sync(kAllLanes, mine.queries, found);
      now.first_query = __shfl_sync(kAllLanes, mine.first_query, found);
      now.tiles = __shfl_sync(kAllLanes, mine.tiles, found);
      now.cost = __shfl_sync(kAllLanes, mine.cost, found);
      return place(position - before);
    }
    left = 0;
  }

  __device__ void place(std::uint64_t inside) {
    const std::uint64_t at = divide(inside, now.cost);
    offset = static_cast<std::uint32_t>(inside - at * now.cost);
    head = static_cast<std::uint32_t>(divide(at, now.tiles));
    tile = static_cast<std::uint32_t>(at - std::uint64_t{head} * now.tiles);
  }

  // The next piece, with `now` still its sequence; false at the end. Call step() before the next one.
  __device__ bool next(const AttendParams& p, Piece& piece) {
    if (left == 0) return false;
    while (now.tiles == 0) {
      if (++sequence >= p.batch) return false;
      now = read_sequence<kRows>(p, sequence);
    }
    const std::uint32_t end = static_cast<std::uint32_t>(min(left + offset, std::uint64_t{now.cost}));
    std::uint32_t first, count;
    tile_pages(p, first, count);
    piece = {sequence, head, tile, first + min(offset, count), first + min(end, count), offset == 0, end == now.cost};
    return true;
  }

  // Whether the piece that next() gave is the unit's last one.
  __device__ bool is_last() const { return left <= now.cost - offset; }

  __device__ void step() {
    const std::uint32_t taken = static_cast<std::uint32_t>(min(left, std::uint64_t{now.cost - offset}));
    left -= taken;
    offset += taken;
    if (offset < now.cost) return;
    offset = 0;
    if (++tile < now.tiles) return;
    tile = 0;
    if (++head < heads) return;
    head = 0;
    now.tiles = 0;
  }

  // Pages that some row of the tile sees. Positions ascend, so its first and last query token decide.
  __device__ void tile_pages(const AttendParams& p, std::uint32_t& first, std::uint32_t& count) const {
    const std::uint32_t rows = now.queries * p.group;
    const std::int64_t low = first_position() + tile * kRows / p.group;
    const std::int64_t high = first_position() + (min((tile + 1) * kRows, rows) - 1) / p.group;
    const std::int64_t end = p.causal ? min(high + 1, std::int64_t{now.length}) : now.length;
    const std::int64_t begin = p.window >= 0 ? max(std::int64_t{0}, low - p.window + 1) : 0;
    first = count = 0;
    if (begin >= end) return;
    first = static_cast<std::uint32_t>(begin) / kPageTokens;
    count = (static_cast<std::uint32_t>(end) + kPageTokens - 1) / kPageTokens - first;
  }

  __device__ std::int64_t first_position() const { return std::int64_t{now.length} - now.queries; }

  std::uint32_t heads;
};

}  // namespace kvq::cuda
