// The pages of a unit, in order, as a stream of pieces in the warp's ring: lookups run ahead of copies, copies ahead of
// use.
//
// Invariant: the stream gives out pieces in the order of the unit's cursor; the consumer walks a cursor of its own and
// always agrees with it. A dense page comes in four pieces of 16 tokens (their keys, then their values), k8v4 in two
// (all of its keys, then its values), every other in one. What has no bytes (the null page, a fault) still takes a
// stage.
#pragma once

#include "kernels/cuda/page_lookup.cuh"
#include "kernels/cuda/ring.cuh"
#include "kernels/cuda/schedule.cuh"

namespace kvq::cuda {

inline constexpr std::uint32_t kDensePieces = 4, kPieceTokens = kPageTokens / kDensePieces;

template <std::uint32_t kD, std::uint32_t kRows, bool kOnce>
class PageStream {
 public:
  __device__ PageStream(const AttendParams& p, std::uint32_t lane) : p_(p), lane_(lane) {}

  __device__ void begin(const Ring& ring, const Cursor<kRows>& cursor) {
    ring_ = ring;
    cursor_ = cursor;
    for (std::uint32_t s = 0; s < ring_.stages; ++s) issue(s);
  }

  // The next piece: what it is (the same for all lanes), and where its bytes are once wait() returns.
  __device__ Kind kind() const { return static_cast<Kind>((kinds_ >> (4 * ring_.stage)) & kKindMask); }
  __device__ std::uint32_t wait() const { return ring_.wait(); }
  // The warp has read the piece; its stage takes another, and the lookups that are due go on by a step.
  __device__ void release() {
    __syncwarp();
    issue(ring_.stage);
    ring_.advance();
    if (step_ == Step::none) {
      begin_lookup();
    } else if (step_ == Step::numbers) {
      end_lookup();
    }
  }

 private:
  enum class Step : std::uint32_t { none, numbers, blocks };

  // Reads the numbers of the next pages of one tile, at most one for each lane. What is read is not looked at before
  // end_lookup().
  __device__ void begin_lookup() {
    while (page_ == page_end_) {
      Piece piece;
      if (!cursor_.next(p_, piece)) return;
      cursor_.step();
      page_ = piece.page_begin;
      page_end_ = piece.page_end;
      sequence_ = piece.sequence;
      head_ = piece.head;
    }
    ahead_count_ = min(32u, page_end_ - page_);
    ahead_sequence_ = sequence_;
    ahead_head_ = head_;
    const std::uint32_t page = page_ + lane_;
    page_ += ahead_count_;
    const bool inside = page < p_.table_stride;
    beyond_ = !inside;
    if (lane_ < ahead_count_ && inside) number_ = __ldg(p_.tables + sequence_ * p_.table_stride + page);
    step_ = Step::numbers;
  }

  __device__ void end_lookup() {
    step_ = Step::blocks;
    if (lane_ >= ahead_count_) return;
    if (beyond_) {
      report_fault(p_.pages, Errc::invalid_argument, ahead_sequence_,
                   0);  // the length needs more pages than the table has
      ahead_ = static_cast<std::uint64_t>(Kind::fault);
    } else {
      ahead_ = find_block(p_.pages, number_, ahead_head_, ahead_sequence_);
    }
  }

  __device__ static Copy copy_of(Kind kind, std::uint64_t block, std::uint32_t part) {
    constexpr std::uint32_t kPieceBytes = kPieceTokens * kD * 2;
    switch (kind) {
      case Kind::dense:
        return {block + part * kPieceBytes, kPieceBytes, block + kPageTokens * kD * 2 + part * kPieceBytes,
                kPieceBytes};
      case Kind::int4:
        return {block, static_cast<std::uint32_t>(block_bytes(Format::int4, kD)), 0, 0};
      case Kind::int4_k4:
        return {block, static_cast<std::uint32_t>(block_bytes(Format::int4_k4, kD)), 0, 0};
      case Kind::int4_k8:
        return {block, static_cast<std::uint32_t>(block_bytes(Format::int4_k8, kD)), 0, 0};
      case Kind::k8v4: {
        constexpr BlockOffsets at = block_offsets(Format::k8v4, kD);
        return part == 0 ? Copy{block, at.v, 0, 0} : Copy{block + at.v, at.end - at.v, 0, 0};
      }
      default:
        return {0, 0, 0, 0};
    }
  }

  __device__ void issue(std::uint32_t stage) {
    if (used_ == count_) {
      if (step_ == Step::none) begin_lookup();
      if (step_ == Step::numbers) end_lookup();
      if (step_ == Step::none) return;
      window_ = ahead_;
      count_ = ahead_count_;
      used_ = 0;
      step_ = Step::none;
    }
    const Kind kind = static_cast<Kind>(__shfl_sync(kAllLanes, static_cast<std::uint32_t>(window_ & kKindMask), used_));
    ring_.template start<kOnce>(stage, copy_of(kind, window_ & ~kKindMask, part_), used_, lane_);
    kinds_ = (kinds_ & ~(15u << (4 * stage))) | (static_cast<std::uint32_t>(kind) << (4 * stage));
    const std::uint32_t parts = kind == Kind::dense ? kDensePieces : kind == Kind::k8v4 ? 2u : 1u;
    if (++part_ == parts) {
      part_ = 0;
      ++used_;
    }
  }

  const AttendParams& p_;
  const std::uint32_t lane_;
  Ring ring_;
  Cursor<kRows> cursor_;
  std::uint64_t window_ = 0, ahead_ = 0;  // one page for each lane: address and Kind
  std::int32_t number_ = 0;
  bool beyond_ = false;
  Step step_ = Step::none;  // of what comes after the window
  std::uint32_t count_ = 0, ahead_count_ = 0, used_ = 0, part_ = 0, kinds_ = 0;
  std::uint32_t page_ = 0, page_end_ = 0, sequence_ = 0, head_ = 0, ahead_sequence_ = 0, ahead_head_ = 0;
};

}  // namespace kvq::cuda
