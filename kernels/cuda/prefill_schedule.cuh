// How the tiles of a call with many query rows are cut into equal shares, one for each block of threads.
//
// Invariant: the work is one line of positions in the order (sequence, KV head, tile, page), as in schedule.cuh, but a
// tile has about as many positions as pages that it sees: at most two more, never less, and a closed form in the
// tile's number, so that a causal chunk is cut evenly without a list of tiles. Where whole tiles are (nearly) as even,
// each is one position and nothing is cut.
//
// A unit takes its whole tiles first, all units from their first page on: units of one KV head then read the same
// pages at about the same time, out of the second-level cache. What it shares with its neighbours comes last.
#pragma once

#include "kernels/cuda/prefill_shape.h"
#include "kernels/cuda/schedule.cuh"

namespace kvq::cuda {

inline constexpr std::uint32_t kCutPages = 10;  // what cutting tiles costs a call, in pages of a unit

// One sequence: tile i costs min(base + floor((c i + c - 1) / group), most) pages, c = kRows / 64.
struct TileLine {
  std::int32_t length, queries, first_query;
  std::uint32_t tiles;       // of each KV head; 0: no rows
  std::uint32_t base, most;  // base == most: all alike
  std::uint32_t cross;       // the first tile that costs `most`
};

template <std::uint32_t kRows>
struct TileCosts {
  static constexpr std::uint32_t kPer = kRows / kPageTokens;  // c
  static_assert(kPer == 1 || kPer == 2);
  std::uint32_t group;
  bool whole;  // a tile is one position

  __device__ TileLine read(const AttendParams& p, std::uint32_t s) const {
    TileLine q;
    q.length = max(0, __ldcg(p.lengths + s));
    q.first_query = __ldcg(p.query_starts + s);
    q.queries = max(0, __ldcg(p.query_starts + s + 1) - q.first_query);
    q.tiles = tiles_of<kRows>(p, q.queries);
    q.most = most_pages<kRows>(p, q.length, q.queries);
    q.base = q.most;
    q.cross = 0;
    if (p.causal) {
      q.base = min(q.most, static_cast<std::uint32_t>(max(0, q.length - q.queries)) / kPageTokens + 2);
      q.cross = static_cast<std::uint32_t>(std::uint64_t{q.most - q.base} * group / kPer);
    }
    return q;
  }

  __device__ std::uint32_t cost(const TileLine& q, std::uint32_t tile) const {
    if (whole) return 1;
    return tile >= q.cross ? q.most : q.base + (kPer * tile + kPer - 1) / group;
  }

  // Positions of the tiles below `tile`.
  __device__ std::uint64_t before(const TileLine& q, std::uint32_t tile) const {
    if (whole) return tile;
    const std::uint32_t growing = min(tile, q.cross), turns = growing / group, rest = growing - turns * group;
    const std::uint64_t full = std::uint64_t{group} * turns * (turns - (turns != 0 ? 1 : 0));
    std::uint64_t sum = std::uint64_t{growing} * q.base + std::uint64_t{tile - growing} * q.most;
    if constexpr (kPer == 1) {
      sum += full / 2 + std::uint64_t{rest} * turns;
    } else {
      sum += full + std::uint64_t{turns} * (group - group / 2 + 2 * rest) + (rest > group / 2 ? rest - group / 2 : 0);
    }
    return sum;
  }

  __device__ std::uint64_t work(const AttendParams& p, const TileLine& q) const {
    return p.kv_heads * before(q, q.tiles);
  }

  // The tile that has position `at` of its head's.
  __device__ std::uint32_t tile_of(const TileLine& q, std::uint64_t at) const {
    std::uint32_t low = 0, high = q.tiles;
    while (high - low > 1) {
      const std::uint32_t middle = (low + high) / 2;
      if (before(q, middle) <= at) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Decides `whole` and returns the shares; all lanes of a warp. Whole tiles: the units' largest share grows to that of
  // ceil(tiles / units) of the longest.
  __device__ Shares shares(const AttendParams& p, std::uint32_t units, std::uint32_t lane) {
    whole = false;
    std::uint64_t pages = 0, tiles = 0;
    std::uint32_t longest = 1;
    for (std::uint32_t s = lane; s < p.batch; s += 32) {
      const TileLine q = read(p, s);
      if (q.tiles == 0) continue;
      pages += work(p, q);
      tiles += std::uint64_t{p.kv_heads} * q.tiles;
      longest = max(longest, cost(q, q.tiles - 1));
    }
    pages = sum_over_warp(pages);
    tiles = sum_over_warp(tiles);
    longest = __reduce_max_sync(kAllLanes, longest);
    const Shares equal = Shares::of(pages, units), by_tile = Shares::of(tiles, units);
    whole = tiles == 0 || by_tile.each * longest <= equal.each + kCutPages;
    return whole ? by_tile : equal;
  }
};

// Pages [page_begin, page_end) of one tile.
struct TilePiece {
  TileLine of;
  std::uint32_t sequence, head, tile;
  std::uint32_t page_begin, page_end;
  std::uint64_t tile_end;  // the position behind the tile's last one
  bool begins, ends;       // whether the tile's first and last positions are in it
  bool last;               // of the unit's share (not of what it takes last)
};

// The pieces of one unit in the order in which it takes them; all lanes of a warp call it.
template <std::uint32_t kRows>
class TileWalk {
 public:
  __device__ void begin(const AttendParams& p, const TileCosts<kRows>& costs, std::uint64_t position,
                        std::uint64_t count, std::uint32_t lane) {
    costs_ = costs;
    left_ = count;
    end_ = position + count;
    has_late_ = false;
    if (count == 0) return;
    seek(p, position, lane);
    if (left_ != 0 && offset_ != 0) {
      step(p, late_);
      has_late_ = true;
    }
  }

  __device__ bool next(const AttendParams& p, TilePiece& piece) {
    if (left_ != 0) {
      step(p, piece);
      return true;
    }
    if (!has_late_) return false;
    piece = late_;
    has_late_ = false;
    return true;
  }

 private:
  // 32 sequences at a time.
  __device__ void seek(const AttendParams& p, std::uint64_t position, std::uint32_t lane) {
    std::uint64_t before = 0;
    for (std::uint32_t first = 0; first < p.batch; first += 32) {
      const std::uint32_t s = first + lane;
      const std::uint64_t work = s < p.batch ? costs_.work(p, costs_.read(p, s)) : 0;
      const int found = lane_of(work, position, before);
      if (found < 0) continue;
      sequence_ = first + static_cast<std::uint32_t>(found);
      std::uint64_t inside = position - before;
      now_ = costs_.read(p, sequence_);
      const std::uint64_t each = costs_.before(now_, now_.tiles);
      head_ = static_cast<std::uint32_t>(divide(inside, each));
      inside -= head_ * each;
      tile_ = costs_.tile_of(now_, inside);
      offset_ = static_cast<std::uint32_t>(inside - costs_.before(now_, tile_));
      return;
    }
    left_ = 0;
  }

  __device__ void step(const AttendParams& p, TilePiece& piece) {
    while (now_.tiles == 0) now_ = costs_.read(p, ++sequence_);
    const std::uint32_t cost = costs_.cost(now_, tile_);
    const std::uint32_t taken = static_cast<std::uint32_t>(min(left_, std::uint64_t{cost - offset_}));
    std::uint32_t first, count;
    TileTokens::of<kRows>(p, now_.length, now_.queries, tile_).pages(first, count);
    piece.of = now_;
    piece.sequence = sequence_, piece.head = head_, piece.tile = tile_;
    piece.begins = offset_ == 0;
    offset_ += taken;
    left_ -= taken;
    piece.ends = offset_ == cost;
    piece.last = left_ == 0;
    piece.tile_end = end_ - left_ + (cost - offset_);
    piece.page_begin = first + (costs_.whole ? 0 : min(offset_ - taken, count));
    piece.page_end = first + (costs_.whole ? count : min(offset_, count));
    if (!piece.ends) return;
    offset_ = 0;
    if (++tile_ < now_.tiles) return;
    tile_ = 0;
    if (++head_ < p.kv_heads) return;
    head_ = 0;
    now_.tiles = 0;
  }

  TileCosts<kRows> costs_;
  std::uint64_t left_, end_;
  std::uint32_t sequence_, head_, tile_, offset_;
  TileLine now_;
  TilePiece late_;
  bool has_late_;
};

}  // namespace kvq::cuda
