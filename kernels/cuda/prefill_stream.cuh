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
  std::uint64_t block;       // address, its Kind in the low bits
  std::uint32_t begin, end;  // the tokens that some row of the tile may see
};
inline constexpr std::uint32_t kNoMorePages = 0xffffffffu;  // as `begin`

// Everything but the pages: at the start of a block's shared memory.
template <std::uint32_t kRows>
struct PrefillRecords {
  std::uint64_t keys_full[8], keys_empty[8], values_full[8], values_empty[8];
  std::uint64_t raw_full[kMaxRawSlots], raw_empty[kMaxRawSlots];
  PageRecord page[kMaxRawSlots];
  TileWalk<kRows> walk[9];  // of each consumer warp, then of the stream
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
  __device__ RawStream(const AttendParams& p, PrefillRecords<kRows>& records, std::uint32_t ring, std::uint32_t lane)
      : p_(p), records_(records), ring_(ring), lane_(lane) {}

  // Fills all slots but one, which issue_next() will fill first.
  __device__ void begin() {
    for (std::uint32_t s = 0; s + 1 < p_.stages; ++s) issue_next();
  }

  // The next page's record and bytes into the next slot, once its last readers have left it.
  __device__ void issue_next() {
    if (done_) return;
    if (used_ == count_) {
      refill();
    } else if (step_ == Step::none) {
      begin_lookup();
    } else if (step_ == Step::numbers) {
      end_lookup();
    }
    if (turn_ != 0) barrier_wait(shared_address(&records_.raw_empty[slot_]), (turn_ - 1) & 1);
    const std::uint32_t full = shared_address(&records_.raw_full[slot_]);
    if (count_ == 0) {
      done_ = true;
      if (lane_ == 0) {
        records_.page[slot_] = {0, kNoMorePages, 0};
        barrier_arrive(full);
      }
      return;
    }
    if (lane_ == used_) {
      records_.page[slot_] = mine_;
      const std::uint32_t bytes = block_size(static_cast<Kind>(mine_.block & kKindMask));
      if (bytes != 0) {
        barrier_copy(full, ring_ + slot_ * p_.slot_bytes, mine_.block & ~kKindMask, bytes);
      } else {
        barrier_arrive(full);
      }
    }
    ++used_;
    if (++slot_ == p_.stages) slot_ = 0, ++turn_;
  }

 private:
  __device__ static std::uint32_t block_size(Kind kind) {
    switch (kind) {
      case Kind::int4:
        return static_cast<std::uint32_t>(block_bytes(Format::int4, kD));
      case Kind::int4_k4:
        return static_cast<std::uint32_t>(block_bytes(Format::int4_k4, kD));
      case Kind::int4_k8:
        return static_cast<std::uint32_t>(block_bytes(Format::int4_k8, kD));
      case Kind::k8v4:
        return static_cast<std::uint32_t>(block_bytes(Format::k8v4, kD));
      default:
        return 0;
    }
  }

  // What the calls before have looked up becomes the window.
  __device__ void refill() {
    if (step_ == Step::none) begin_lookup();
    if (step_ == Step::numbers) end_lookup();
    used_ = 0;
    count_ = ahead_count_;
    mine_ = ahead_;
    ahead_count_ = 0;
    step_ = Step::none;
  }

  // Reads the numbers of the next pages of one tile, at most one for each lane. What is read is not looked at before
  // end_lookup().
  __device__ void begin_lookup() {
    while (page_ == page_end_) {
      TilePiece piece;
      if (!next_piece(p_, records_.walk[8], piece)) return;
      page_ = piece.page_begin;
      page_end_ = piece.page_end;
      sequence_ = piece.sequence;
      head_ = piece.head;
      const std::int32_t start = piece.of.length - piece.of.queries;
      const std::uint32_t rows = piece.of.queries * p_.group;
      const auto low = start + static_cast<std::int32_t>(piece.tile * kRows / p_.group);
      const auto high = start + static_cast<std::int32_t>((min((piece.tile + 1) * kRows, rows) - 1) / p_.group);
      end_ = p_.causal ? min(piece.of.length, high + 1) : piece.of.length;
      begin_ = p_.window < 0 ? 0 : max(0, low - p_.window + 1);
    }
    step_ = Step::numbers;
    first_ = page_;
    ahead_count_ = min(32u, page_end_ - page_);
    page_ += ahead_count_;
    const std::uint32_t page = first_ + lane_;
    if (lane_ < ahead_count_ && page < p_.table_stride) {
      number_ = __ldg(p_.tables + sequence_ * p_.table_stride + page);
    }
  }

  __device__ void end_lookup() {
    step_ = Step::blocks;
    if (lane_ >= ahead_count_) return;
    const std::uint32_t page = first_ + lane_;
    if (page < p_.table_stride) {
      ahead_.block = find_block(p_.pages, number_, head_, sequence_, true);
    } else {
      report_fault(p_.pages, Errc::invalid_argument, sequence_, 0);  // the length needs more pages than the table has
      ahead_.block = static_cast<std::uint64_t>(Kind::fault);
    }
    const auto first_key = static_cast<std::int32_t>(page * kPageTokens);
    constexpr auto kAll = static_cast<std::int32_t>(kPageTokens);
    ahead_.begin = static_cast<std::uint32_t>(max(0, min(kAll, begin_ - first_key)));
    ahead_.end = static_cast<std::uint32_t>(max(0, min(kAll, end_ - first_key)));
  }

  enum class Step : std::uint32_t { none, numbers, blocks };

  const AttendParams& p_;
  PrefillRecords<kRows>& records_;
  const std::uint32_t ring_, lane_;
  PageRecord mine_{}, ahead_{};
  std::uint32_t used_ = 0, count_ = 0, ahead_count_ = 0, slot_ = 0, turn_ = 0;
  std::uint32_t page_ = 0, page_end_ = 0, sequence_ = 0, head_ = 0;
  std::int32_t begin_ = 0, end_ = 0, number_ = 0;
  std::uint32_t first_ = 0;  // page of lane 0 in what is looked up
  Step step_ = Step::none;   // of what comes after the window
  bool done_ = false;
};

}  // namespace kvq::cuda
