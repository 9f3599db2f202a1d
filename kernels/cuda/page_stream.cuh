// The pages of a unit, in order, as a stream of pieces in the warp's ring: lookups run ahead of copies, copies ahead of
// use.
//
// Invariant: the stream gives out pieces in the order of the unit's cursor; the consumer walks a cursor of its own and
// always agrees with it. A dense page comes in four pieces of 16 tokens (their keys, then their values), a quantized
// one whole, or, where there is no room for it, its keys first. What has no bytes (the null page, a fault) still takes
// a stage.
#pragma once

#include "kernels/cuda/page_lookup.cuh"
#include "kernels/cuda/ring.cuh"
#include "kernels/cuda/schedule.cuh"

namespace kvq::cuda {

inline constexpr std::uint32_t kDensePieces = 4, kPieceTokens = kPageTokens / kDensePieces;

// kHalves: see halves_pages().
template <std::uint32_t kD, std::uint32_t kRows, bool kOnce, bool kHalves>
class PageStream {
 public:
  __device__ PageStream(const AttendParams& p, std::uint32_t lane) : p_(p), lane_(lane) {}

  // Finds the first pages of the unit. `reports`: says of those that it cannot find.
  __device__ void look(const Cursor<kRows>& cursor, bool reports) {
    cursor_ = cursor;
    reports_ = reports;
    step_ = Step::none;
    page_ = page_end_ = count_ = used_ = 0;
    while (step_ != Step::blocks && !is_over()) look_further();
  }

  // Fills what is left of the ring.
  __device__ void begin(const Ring& ring) {
    if (begun_ == 0) ring_ = ring;
#pragma unroll 1
    for (; begun_ < ring_.stages; ++begun_) {
      const std::uint32_t stage = ring_.stage + begun_;
      fill(stage < ring_.stages ? stage : stage - ring_.stages);
    }
  }

  // Fills the ring with pages that cannot change any more, as far as they come first. Each lane asks for its own.
  __device__ void begin_early(const Ring& ring) {
    ring_ = ring;
    if (!take_window()) return;
    const unsigned others = ~__ballot_sync(kAllLanes, is_whole(own_kind()));
    begun_ = min(min(ring_.stages, count_), static_cast<std::uint32_t>(__ffs(static_cast<int>(others)) - 1));
    if (lane_ < begun_) ring_.template start<kOnce>(lane_, copy_of(own_kind(), own_block(), 0), lane_, lane_);
    used_ = begun_;
#pragma unroll
    for (std::uint32_t stage = 0; stage < kMaxStages; ++stage) {
      kinds_ |= __shfl_sync(kAllLanes, static_cast<std::uint32_t>(own_kind()), stage) << (4 * stage);
    }
  }

  // The number of a lane's page once more, for confirm().
  __device__ std::int32_t ask_again() const {
    if (lane_ >= ahead_count_ || beyond_) return number_;
    return __ldcg(p_.tables + ahead_sequence_ * p_.table_stride + ahead_page_ + lane_);
  }

  // Whether what look() has found is still so for all lanes, now that nothing changes it; `same` is so for this one.
  __device__ bool confirm(std::int32_t number, bool same) {
    if (lane_ < ahead_count_) {
      same = same && number == number_ && (ahead_ & kKindMask) != static_cast<std::uint64_t>(Kind::fault);
      if (p_.pages.aliases != nullptr) {
        same = same && find_block(p_.pages, number, ahead_head_, ahead_sequence_, false) == ahead_;
      }
    }
    reports_ = true;
    return __all_sync(kAllLanes, same);
  }

  // Takes back what begin() has done; the ring goes on from where it is.
  __device__ void drop(Ring& ring) {
#pragma unroll 1
    for (; begun_ > 0; --begun_) {
      ring_.wait();
      ring_.advance();
      ring = ring_;
    }
    __syncwarp();
  }

  // The next piece: what it is (the same for all lanes), and where its bytes are once wait() returns.
  __device__ __forceinline__ Kind kind() const { return static_cast<Kind>((kinds_ >> (4 * ring_.stage)) & kKindMask); }
  __device__ __forceinline__ std::uint32_t wait() const { return ring_.wait(); }
  // The warp has read the piece; its stage takes another.
  __device__ __forceinline__ void release() {
    __syncwarp();
    fill(ring_.stage);
    ring_.advance();
  }

 private:
  enum class Step : std::uint32_t { none, numbers, blocks };

  // Whether nothing is left to look for.
  __device__ bool is_over() const { return step_ == Step::none && page_ == page_end_ && cursor_.left == 0; }

  // A step of the lookups: the numbers of the next pages of one tile, at most one for each lane; or, where these have
  // been asked for, their blocks. What is read is not looked at before the next step.
  __device__ void look_further() {
    if (step_ == Step::numbers) return end_lookup();
    while (page_ == page_end_) {
      Piece piece;
      if (!cursor_.next(p_, piece)) {
        cursor_.left = 0;
        return;
      }
      cursor_.step();
      page_ = piece.page_begin;
      page_end_ = piece.page_end;
      sequence_ = piece.sequence;
      head_ = piece.head;
    }
    ahead_count_ = min(32u, page_end_ - page_);
    ahead_sequence_ = sequence_;
    ahead_head_ = head_;
    ahead_page_ = page_;
    const std::uint32_t page = page_ + lane_;
    page_ += ahead_count_;
    const bool inside = page < p_.table_stride;
    beyond_ = !inside;
    if (lane_ < ahead_count_ && inside) number_ = __ldcg(p_.tables + sequence_ * p_.table_stride + page);
    step_ = Step::numbers;
  }

  __device__ void end_lookup() {
    step_ = Step::blocks;
    if (lane_ >= ahead_count_) return;
    if (beyond_) {  // the length needs more pages than the table has
      if (reports_) report_fault(p_.pages, Errc::invalid_argument, ahead_sequence_, 0);
      ahead_ = static_cast<std::uint64_t>(Kind::fault);
    } else {
      ahead_ = find_block(p_.pages, number_, ahead_head_, ahead_sequence_, reports_);
    }
  }

  // A lane's page of the window.
  __device__ Kind own_kind() const { return static_cast<Kind>(window_ & kKindMask); }
  __device__ std::uint64_t own_block() const { return window_ & ~kKindMask; }

  __device__ static constexpr bool is_whole(Kind kind) {
    return is_quantized(kind) && !(kHalves && kind == Kind::k8v4);
  }

  __device__ static Copy copy_of(Kind kind, std::uint64_t block, std::uint32_t part) {
    constexpr std::uint32_t kPieceBytes = kPieceTokens * kD * 2, kKeys = block_offsets(Format::k8v4, kD).v;
    if (is_whole(kind)) return {block, block_bytes_of<kD>(kind), 0, 0};
    if (is_quantized(kind)) return {block + part * kKeys, part == 0 ? kKeys : block_bytes_of<kD>(kind) - kKeys, 0, 0};
    if (kind != Kind::dense) return {0, 0, 0, 0};
    return {block + part * kPieceBytes, kPieceBytes, block + kPageTokens * kD * 2 + part * kPieceBytes, kPieceBytes};
  }

  __device__ __forceinline__ bool take_window() {
    if (used_ != count_) return true;
    if (step_ != Step::blocks) return false;
    window_ = ahead_;
    count_ = ahead_count_;
    used_ = 0;
    step_ = Step::none;
    int4_ = __ballot_sync(kAllLanes, own_kind() == Kind::int4);
    return true;
  }

  // Asks for the next piece, if there is one. The lookups go on by a step with each, and as far as they must at the end
  // of a window.
  __device__ __forceinline__ void fill(std::uint32_t stage) {
    while (step_ != Step::blocks && !is_over()) {
      look_further();
      if (used_ != count_) break;
    }
    if (!take_window()) return;
    Kind kind = Kind::int4;
    bool last = true;
    if (((int4_ >> used_) & 1) != 0) {  // what nearly all are
      ring_.template start<kOnce>(stage, copy_of(Kind::int4, own_block(), 0), used_, lane_);
    } else {
      kind = static_cast<Kind>(__shfl_sync(kAllLanes, static_cast<std::uint32_t>(own_kind()), used_));
      ring_.template start<kOnce>(stage, copy_of(kind, own_block(), part_), used_, lane_);
      last = part_ + 1 == (kind == Kind::dense ? kDensePieces : kHalves && kind == Kind::k8v4 ? 2 : 1);
      if (part_ != 0 && kind != Kind::dense) kind = Kind::values;
      part_ = last ? 0 : part_ + 1;
    }
    kinds_ = (kinds_ & ~(15u << (4 * stage))) | (static_cast<std::uint32_t>(kind) << (4 * stage));
    used_ += last;
  }

  const AttendParams& p_;
  const std::uint32_t lane_;
  Ring ring_;
  Cursor<kRows> cursor_;
  std::uint64_t window_ = 0, ahead_ = 0;  // one page for each lane: address and Kind
  std::int32_t number_ = 0;
  bool beyond_ = false, reports_ = false;
  Step step_ = Step::none;  // of what comes after the window
  std::uint32_t int4_ = 0;  // which pages of the window are that
  std::uint32_t count_ = 0, ahead_count_ = 0, used_ = 0, part_ = 0, kinds_ = 0;
  std::uint32_t page_ = 0, page_end_ = 0, sequence_ = 0, head_ = 0;
  std::uint32_t ahead_page_ = 0, ahead_sequence_ = 0, ahead_head_ = 0;
  std::uint32_t begun_ = 0;  // stages that begin() has filled
};

}  // namespace kvq::cuda
