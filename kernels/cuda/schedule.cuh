// How the work of a call is cut into equal shares, found by every warp for itself from the lengths on the device.
//
// Invariant: the work is one line of positions, in the order (sequence, KV head, tile, page); each tile has at least as
// many positions as the pages that any tile of its sequence can see, and at least one, so that all rows are written.
// Unit u owns the positions [unit_begin(u), unit_begin(u + 1)). Nothing is stored: grid and workspace do not depend on
// batch or lengths. Everything is read past the first-level cache, since a kernel looks twice (attend_kernel.cuh).
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

// Of each KV head.
template <std::uint32_t kRows>
__device__ inline std::uint32_t tiles_of(const AttendParams& p, std::int32_t queries) {
  return static_cast<std::uint32_t>((std::uint64_t{static_cast<std::uint32_t>(queries)} * p.group + kRows - 1) / kRows);
}

// Pages that any tile of a sequence can see, at least one.
template <std::uint32_t kRows>
__device__ inline std::uint32_t most_pages(const AttendParams& p, std::int32_t length, std::int32_t queries) {
  std::int64_t keys = length;
  if (p.window >= 0) {
    // A tile's queries are neighbours; without a causal limit its first one sees everything behind it as well.
    const std::int64_t span = p.causal ? (kRows - 1) / p.group + 1 : queries;
    keys = min(keys, std::int64_t{p.window} + span + kPageTokens - 1);
  }
  return max(1u, static_cast<std::uint32_t>((keys + kPageTokens - 1) / kPageTokens));
}

// Tokens that some row of a tile sees. Positions ascend, so its first and last query token decide.
struct TileTokens {
  std::int64_t begin, end;

  template <std::uint32_t kRows>
  __device__ static TileTokens of(const AttendParams& p, std::int32_t length, std::int32_t queries,
                                  std::uint32_t tile) {
    const std::uint32_t rows = queries * p.group;
    const std::int64_t start = std::int64_t{length} - queries;
    const std::int64_t low = start + tile * kRows / p.group;
    const std::int64_t high = start + (min((tile + 1) * kRows, rows) - 1) / p.group;
    return {p.window >= 0 ? max(std::int64_t{0}, low - p.window + 1) : 0,
            p.causal ? min(high + 1, std::int64_t{length}) : length};
  }
  __device__ void pages(std::uint32_t& first, std::uint32_t& count) const {
    first = count = 0;
    if (begin >= end) return;
    first = static_cast<std::uint32_t>(begin) / kPageTokens;
    count = (static_cast<std::uint32_t>(end) + kPageTokens - 1) / kPageTokens - first;
  }
};

// A tile takes a warp as long to begin and to finish as so many pages take to read. Where tiles are long that is
// little, and round lengths are to end where units do.
inline constexpr std::uint32_t kTileCost = 2, kLongTile = 64;

template <std::uint32_t kRows>
__device__ inline Sequence make_sequence(const AttendParams& p, std::int32_t length, std::int32_t first_query,
                                         std::int32_t next_query) {
  Sequence q;
  q.length = max(0, length);
  q.first_query = first_query;
  q.queries = max(0, next_query - first_query);
  q.tiles = tiles_of<kRows>(p, q.queries);
  q.cost = most_pages<kRows>(p, q.length, q.queries);
  if (q.cost < kLongTile) q.cost += kTileCost;
  return q;
}

__device__ inline std::uint64_t sequence_work(const AttendParams& p, const Sequence& q) {
  return std::uint64_t{p.kv_heads} * q.tiles * q.cost;
}

__device__ inline std::uint64_t sum_over_warp(std::uint64_t x) {
  if (__all_sync(kAllLanes, x >> 27 == 0)) return __reduce_add_sync(kAllLanes, static_cast<unsigned>(x));
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// What the schedule reads of sequences: lane l has first + l, first + l + 32 and so on. They are asked for together,
// since under load each answer takes microseconds.
struct Lengths {
  static constexpr std::uint32_t kEach = 4, kCount = 32 * kEach;
  std::int32_t length[kEach], first_query[kEach], next_query[kEach];

  __device__ static Lengths read(const AttendParams& p, std::uint32_t first, std::uint32_t lane) {
    Lengths out;
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
      const std::uint32_t s = first + 32 * i + lane;
      out.length[i] = out.first_query[i] = out.next_query[i] = 0;
      if (s >= p.batch) continue;
      out.length[i] = __ldcg(p.lengths + s);
      out.first_query[i] = __ldcg(p.query_starts + s);
      out.next_query[i] = __ldcg(p.query_starts + s + 1);
    }
    return out;
  }

  template <std::uint32_t kRows>
  __device__ Sequence sequence(const AttendParams& p, std::uint32_t i) const {
    return make_sequence<kRows>(p, length[i], first_query[i], next_query[i]);
  }

  // Goes on with a number that stands for all that a lane has read: another one means other lengths or queries, the
  // same one the same (but for one in 2^64). Sequences that are read again for their place are read behind this, so
  // they are as old or newer; only a length that had changed and changed back in between would not show.
  __device__ std::uint64_t digest(std::uint64_t x, std::uint32_t count) const {
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
      if (32 * i >= count) break;
      x = (x ^ static_cast<std::uint32_t>(length[i])) * 0xbf58476d1ce4e5b9ull;
      x = (x ^ (x >> 29) ^ static_cast<std::uint32_t>(first_query[i])) * 0x94d049bb133111ebull;
      x = (x ^ (x >> 31) ^ static_cast<std::uint32_t>(next_query[i])) * 0x9e3779b97f4a7c15ull;
    }
    return x;
  }
};

// All positions of the call, and each lane's digest of what they follow from. `lengths` becomes those of the first
// sequences.
template <std::uint32_t kRows>
__device__ inline std::uint64_t total_work(const AttendParams& p, Lengths& lengths, std::uint64_t& digest,
                                           std::uint32_t lane) {
  std::uint64_t sum = 0;
  digest = 0;
#pragma unroll 1
  for (std::uint32_t first = 0; first < p.batch; first += Lengths::kCount) {
    const Lengths read = Lengths::read(p, first, lane);
    if (first == 0) lengths = read;
    digest = read.digest(digest, p.batch - first);
#pragma unroll
    for (std::uint32_t i = 0; i < Lengths::kEach; ++i) {
      if (first + 32 * i >= p.batch) break;
      sum += sequence_work(p, read.sequence<kRows>(p, i));
    }
  }
  return sum_over_warp(sum);
}

// The digest alone.
__device__ inline std::uint64_t digest_lengths(const AttendParams& p, std::uint32_t lane) {
  std::uint64_t digest = 0;
#pragma unroll 1
  for (std::uint32_t first = 0; first < p.batch; first += Lengths::kCount) {
    digest = Lengths::read(p, first, lane).digest(digest, p.batch - first);
  }
  return digest;
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

  // Stands at `position`; all lanes search together, 32 sequences at a time. `lengths` as total_work() leaves them.
  __device__ void seek(const AttendParams& p, const Lengths& first_lengths, std::uint64_t position, std::uint64_t count,
                       std::uint32_t lane) {
    left = count;
    sequence = head = tile = offset = 0;
    now.tiles = 0;
    if (count == 0) return;
    Lengths lengths = first_lengths;
    std::uint64_t before = 0;
#pragma unroll 1
    for (std::uint32_t first = 0; first < p.batch; first += Lengths::kCount) {
      if (first != 0) lengths = Lengths::read(p, first, lane);
#pragma unroll
      for (std::uint32_t i = 0; i < Lengths::kEach; ++i) {
        if (first + 32 * i >= p.batch) break;
        const Sequence mine = lengths.sequence<kRows>(p, i);
        const int found = lane_of(sequence_work(p, mine), position, before);
        if (found < 0) continue;
        sequence = first + 32 * i + static_cast<std::uint32_t>(found);
        now.length = __shfl_sync(kAllLanes, mine.length, found);
        now.queries = __shfl_sync(kAllLanes, mine.queries, found);
        now.first_query = __shfl_sync(kAllLanes, mine.first_query, found);
        now.tiles = __shfl_sync(kAllLanes, mine.tiles, found);
        now.cost = __shfl_sync(kAllLanes, mine.cost, found);
        return place(position - before);
      }
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
      now = make_sequence<kRows>(p, __ldcg(p.lengths + sequence), __ldcg(p.query_starts + sequence),
                                 __ldcg(p.query_starts + sequence + 1));
    }
    const std::uint32_t end = static_cast<std::uint32_t>(min(left + offset, std::uint64_t{now.cost}));
    std::uint32_t first, count;
    TileTokens::of<kRows>(p, now.length, now.queries, tile).pages(first, count);
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

  std::uint32_t heads;
};

}  // namespace kvq::cuda
