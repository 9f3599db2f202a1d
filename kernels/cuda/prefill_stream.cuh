// The pages of a block of threads, in order, as a ring of records and raw blocks that all producer warps read: lookups
// run ahead of copies, copies ahead of use.
//
// Invariant: one warp runs it. Every slot completes one phase of its `full` barrier per turn of the ring: a quantized
// block with its bytes, anything else with its record alone (dense pages are copied to where they are used). A slot is
// given out again only after every producer warp has arrived at its `empty` barrier. The last record says so.
#pragma once

#include "kernels/cuda/page_lookup.cuh"
#include "kernels/cuda/prefill_mma.cuh"
#include "kernels/cuda/prefill_schedule.cuh"

namespace kvq::cuda {

struct PageRecord {
  std::uint64_t block;   // address, its Kind in the low bits
  std::uint32_t tokens;  // that some row of the tile may see: the first one, and 256 times the one behind the last
  std::uint32_t bytes;   // of the raw block; 0: nothing that the ring brings
};
inline constexpr std::uint32_t kNoMorePages = 0xffffffffu;  // as `bytes`

__device__ __forceinline__ PageRecord load_record(std::uint32_t at) {
  const uint4 w = load_shared4(at);
  return {w.x | std::uint64_t{w.y} << 32, w.z, w.w};
}

// What lookups need from one step to the next; the same for all lanes.
struct LookupState {
  std::uint32_t page, page_end, sequence, head;  // what is next of the current tile
  std::int32_t begin, end;                       // the tokens that the tile sees
  std::uint32_t first, count;                    // the pages that are looked up
};

// Everything but the pages: at the start of a block's shared memory.
template <std::uint32_t kRows>
struct PrefillRecords {
  std::uint64_t full[2][8], empty[2][8];  // of the stages of keys, of values
  std::uint64_t raw_full[kMaxRawSlots], raw_empty[kMaxRawSlots];
  alignas(16) PageRecord page[kMaxRawSlots];
  PageRecord window[2][32];  // looked up; the stream gives out one half while the other is filled
  LookupState lookup;
  TileWalk<kRows> walk[9];  // of each consumer warp, then of the stream
  TilePiece piece[8];       // what each consumer warp is at
};

// Steps a walk that lies in shared memory.
template <std::uint32_t kRows>
__device__ __forceinline__ bool next_piece(const AttendParams& p, TileWalk<kRows>& stored, TilePiece& piece) {
  TileWalk<kRows> walk = stored;
  __syncwarp();
  const bool more = walk.next(p, piece);
  if (threadIdx.x % 32 == 0) stored = walk;
  __syncwarp();
  return more;
}

template <std::uint32_t kD, std::uint32_t kRows>
class RawStream {
 public:
  // Shared addresses: of the ring's slots, its barriers and its records.
  struct Places {
    std::uint32_t ring, full, empty, page;
  };

  __device__ RawStream(const AttendParams& p, PrefillRecords<kRows>& records, const Places& places, std::uint32_t lane)
      : p_(p), records_(records), places_(places), lane_(lane) {}

  __device__ void run() {
    if (lane_ == 0) records_.lookup = {};
    __syncwarp();
    for (;;) {
      if (step_ != Step::blocks || used_ == count_) look_up();
      if (count_ == 0) break;
      issue(records_.window[half_][used_]);
      ++used_;
    }
    for (std::uint32_t i = 0; i < 2; ++i) issue({0, 0, kNoMorePages});  // each producer warpgroup meets one
  }

 private:
  enum class Step : std::uint32_t { none, numbers, blocks };  // of what comes after the window

  // A page's record and bytes into the next slot, once its last readers have left it.
  __device__ __forceinline__ void issue(const PageRecord& page) {
    wait_barrier(places_.empty + 8 * slot_, parity_ ^ 1);
    if (lane_ == 0) {
      const std::uint32_t full = places_.full + 8 * slot_;
      store_shared4(places_.page + 16 * slot_, {static_cast<std::uint32_t>(page.block),
                                                static_cast<std::uint32_t>(page.block >> 32), page.tokens, page.bytes});
      if (static_cast<std::int32_t>(page.bytes) > 0) {
        expect_bytes(full, page.bytes);
        bulk_copy<false>(places_.ring + slot_ * p_.slot_bytes, page.block & ~kKindMask, page.bytes, full, 0);
      } else {
        arrive_barrier(full);
      }
    }
    __syncwarp();
    if (++slot_ == p_.stages) slot_ = 0, parity_ ^= 1;
  }

  // One step of the lookups that are due; all of them when the window is used up.
  __device__ __forceinline__ void look_up() {
    const bool all = used_ == count_;
    if (step_ == Step::none) {
      begin_lookup();
      if (!all) return;
    }
    if (step_ == Step::numbers) end_lookup();
    if (!all) return;
    __syncwarp();
    used_ = 0;
    half_ ^= 1;
    count_ = records_.lookup.count;
    step_ = Step::none;
  }

  // Reads the numbers of the next pages of one tile, at most one for each lane. What is read is not looked at before
  // end_lookup().
  __device__ void begin_lookup() {
    LookupState now = records_.lookup;
    __syncwarp();
    step_ = Step::numbers;
    now.count = 0;
    while (now.page == now.page_end) {
      TilePiece piece;
      if (!next_piece(p_, records_.walk[8], piece)) break;
      now.page = piece.page_begin;
      now.page_end = piece.page_end;
      now.sequence = piece.sequence;
      now.head = piece.head;
      const TileTokens seen = TileTokens::of<kRows>(p_, piece.of.length, piece.of.queries, piece.tile);
      now.begin = static_cast<std::int32_t>(seen.begin);
      now.end = static_cast<std::int32_t>(seen.end);
    }
    now.first = now.page;
    now.count = min(32u, now.page_end - now.page);
    now.page += now.count;
    const std::uint32_t page = now.first + lane_;
    if (lane_ < now.count && page < p_.table_stride) {
      number_ = __ldg(p_.tables + now.sequence * p_.table_stride + page);
    }
    if (lane_ == 0) records_.lookup = now;
    __syncwarp();
  }

  __device__ void end_lookup() {
    step_ = Step::blocks;
    const LookupState& now = records_.lookup;
    if (lane_ >= now.count) return;
    const std::uint32_t page = now.first + lane_;
    PageRecord found;
    if (page < p_.table_stride) {
      found.block = find_block(p_.pages, number_, now.head, now.sequence, true);
    } else {
      report_fault(p_.pages, Errc::invalid_argument, now.sequence,
                   0);  // the length needs more pages than the table has
      found.block = static_cast<std::uint64_t>(Kind::fault);
    }
    const auto first_key = static_cast<std::int32_t>(page * kPageTokens);
    constexpr auto kAll = static_cast<std::int32_t>(kPageTokens);
    found.tokens = static_cast<std::uint32_t>(max(0, min(kAll, now.begin - first_key))) |
                   static_cast<std::uint32_t>(max(0, min(kAll, now.end - first_key))) << 8;
    const auto kind = static_cast<Kind>(found.block & kKindMask);
    found.bytes = is_quantized(kind) ? block_bytes_of<kD>(kind) : 0;
    records_.window[half_ ^ 1][lane_] = found;
  }

  const AttendParams& p_;
  PrefillRecords<kRows>& records_;
  const Places places_;
  const std::uint32_t lane_;
  std::uint32_t half_ = 0, used_ = 0, count_ = 0, slot_ = 0, parity_ = 0;
  std::int32_t number_ = 0;
  Step step_ = Step::none;
};

}  // namespace kvq::cuda
