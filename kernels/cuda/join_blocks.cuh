// Joins the partial states of a tile that several blocks share, in the block that is the last to leave its own.
//
// Invariant: a block's partial states are visible before it counts as arrived. The counter of a tile is that of the
// block where it begins; it is at rest (kMark) before and after a launch, and anything else that memory may hold before
// the first launch reads as "nobody has arrived", so a workspace needs no preparation. Which block joins does not
// change what is added in what order: results are the same from run to run.
#pragma once

#include "kernels/cuda/finish_row.cuh"
#include "kernels/cuda/memory.cuh"

namespace kvq::cuda {

// A tile as the blocks see it that share it: the blocks from `first_block` on have a part of it each.
struct SharedTile {
  std::uint32_t rows, first_row, head;
  std::int32_t first_query;  // of the sequence
  std::uint32_t first_block, blocks;
};

// Four channels of a row on their way through several states.
struct JoinedRow {
  float reference = kNothing, sum = 0;
  float4 out{};

  // Several at once; those that are not there are as they were made.
  template <std::uint32_t kCount>
  __device__ __forceinline__ void add(const JoinedRow (&others)[kCount]) {
    float top = reference;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) top = fmaxf(top, others[i].reference);
    const float keep = reference == kNothing ? 0 : exp2_fast(reference - top);
    sum *= keep;
    out.x *= keep, out.y *= keep, out.z *= keep, out.w *= keep;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) {
      const float take = others[i].reference == kNothing ? 0 : exp2_fast(others[i].reference - top);
      sum = fmaf(others[i].sum, take, sum);
      out.x = fmaf(others[i].out.x, take, out.x);
      out.y = fmaf(others[i].out.y, take, out.y);
      out.z = fmaf(others[i].out.z, take, out.z);
      out.w = fmaf(others[i].out.w, take, out.w);
    }
    reference = top;
  }

  __device__ __forceinline__ void add(float other, float other_sum, const float4& other_out) {
    add<1>({{other, other_sum, other_out}});
  }

  __device__ __forceinline__ void finish(const AttendParams& p, const SharedTile& tile, std::uint32_t row,
                                         std::uint32_t channel) const {
    const OutputRow to(p, tile.first_query, tile.head, tile.first_row + row);
    to.write4(p, channel, out, to.finish(p, reference, sum, channel == 0));
  }
};

inline constexpr unsigned long long kMark = 0x6b76712d6a6f6900ull, kCountMask = 0xff;
static_assert(kMaxBlocks <= kCountMask);

// How many blocks had arrived at `counter` before this one.
__device__ inline std::uint32_t arrive(unsigned long long* counter) {
  unsigned long long seen = add_in_order(counter, 1);
  while ((seen & ~kCountMask) != kMark) {
    // Never used before: nobody's count is in it, and what was just added to it is not one either. From here on nothing
    // is added before the mark is there, or two blocks could keep each other from setting it.
    seen = *static_cast<volatile unsigned long long*>(counter);
    if ((seen & ~kCountMask) == kMark) {
      seen = add_in_order(counter, 1);
    } else if (atomicCAS(counter, seen, kMark | 1) == seen) {
      return 0;
    }
  }
  return static_cast<std::uint32_t>(seen & kCountMask);
}

// Four channels of a row of a partial state.
template <std::uint32_t kD, std::uint32_t kRows>
__device__ __forceinline__ JoinedRow read_part(const float* part, std::uint32_t row, std::uint32_t channel) {
  return {__ldcg(part + row), __ldcg(part + kRows + row),
          __ldcg(reinterpret_cast<const float4*>(part + 2 * kRows + row * kD + channel))};
}

// In shared memory.
struct Arrivals {
  SharedTile tile[2];  // that the block shares with earlier blocks, with later ones; rows 0: none
  bool last[2];        // whether it came last

  // All threads: says that the block's parts of these tiles are written.
  __device__ void announce(const AttendParams& p) {
    __syncthreads();
    if (threadIdx.x < 2) {
      const SharedTile& mine = tile[threadIdx.x];
      bool is_last = false;
      if (mine.rows != 0) {
        is_last = arrive(p.arrivals + mine.first_block) + 1 == mine.blocks;
        if (is_last) p.arrivals[mine.first_block] = kMark;
      }
      last[threadIdx.x] = is_last;
    }
    __syncthreads();
  }
};

inline constexpr std::uint32_t kPartsAtOnce = 8;

// All threads. `scratch` has room for one state a thread.
template <std::uint32_t kD, std::uint32_t kRows>
__device__ inline void join_blocks(const AttendParams& p, const SharedTile& tile, JoinedRow* scratch) {
  const std::uint32_t items = tile.rows * (kD / 4), splits = max(1u, blockDim.x / items);
  const std::uint32_t split = splits == 1 ? 0 : threadIdx.x / items;
  const std::uint32_t first = splits == 1 ? threadIdx.x : threadIdx.x % items;
  for (std::uint32_t item = first; item < items && split < splits; item += splits == 1 ? blockDim.x : items) {
    const std::uint32_t row = item / (kD / 4), channel = item % (kD / 4) * 4;
    JoinedRow joined;
#pragma unroll 1
    for (std::uint32_t begin = split; begin < tile.blocks; begin += kPartsAtOnce * splits) {
      JoinedRow parts[kPartsAtOnce];
#pragma unroll
      for (std::uint32_t n = 0; n < kPartsAtOnce; ++n) {
        const std::uint32_t i = begin + n * splits;
        if (i >= tile.blocks) break;
        parts[n] = read_part<kD, kRows>(
            p.partials + (2 * (tile.first_block + i) + (i == 0 ? 1u : 0u)) * std::uint64_t{partial_floats(kRows, kD)},
            row, channel);
      }
      joined.add(parts);
    }
    if (splits == 1) {
      joined.finish(p, tile, row, channel);
    } else {
      scratch[threadIdx.x] = joined;
    }
  }
  if (splits == 1) return;
  __syncthreads();
  if (threadIdx.x >= items) return;
  JoinedRow joined = scratch[threadIdx.x];
  for (std::uint32_t i = 1; i < splits; ++i) {
    const JoinedRow& other = scratch[threadIdx.x + i * items];
    joined.add(other.reference, other.sum, other.out);
  }
  joined.finish(p, tile, threadIdx.x / (kD / 4), threadIdx.x % (kD / 4) * 4);
}

}  // namespace kvq::cuda
