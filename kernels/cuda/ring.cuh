// A warp's ring of page pieces in shared memory: a lane asks for a copy, all lanes wait for it, use it, and hand the
// stage back.
//
// Invariant: a stage holds one piece and has one barrier; its phases alternate. A stage is asked for again only after
// every lane has read it.
#pragma once

#include "kernels/cuda/memory.cuh"

namespace kvq::cuda {

// Bytes of one stage: up to two stretches of memory, one behind the other.
struct Copy {
  std::uint64_t from;  // 16-byte aligned
  std::uint32_t bytes;
  std::uint64_t from2;
  std::uint32_t bytes2;
};

struct Ring {
  std::uint32_t slots, barriers;  // shared addresses of this warp's stages
  std::uint32_t slot_bytes, stages;
  std::uint32_t stage = 0, phase = 0;
  std::uint64_t policy = 0;

  __device__ void init(std::uint32_t lane) {
    if (lane == 0) {
#pragma unroll 1
      for (std::uint32_t s = 0; s < stages; ++s) prepare_barrier(barriers + 8 * s, kBulkCopies ? 1 : 32);
      prepared_barriers();
    }
    policy = read_once_policy();
    __syncwarp();
  }

  // All lanes call it with one lane's copy: lane `from` has it.
  template <bool kOnce>
  __device__ __forceinline__ void start(std::uint32_t at, const Copy& mine, std::uint32_t from,
                                        std::uint32_t lane) const {
    const std::uint32_t to = slots + at * slot_bytes, barrier = barriers + 8 * at;
    if constexpr (kBulkCopies) {
      if (lane != from) return;
      expect_bytes(barrier, mine.bytes + mine.bytes2);
      if (mine.bytes != 0) bulk_copy<kOnce>(to, mine.from, mine.bytes, barrier, policy);
      if (mine.bytes2 != 0) bulk_copy<kOnce>(to + mine.bytes, mine.from2, mine.bytes2, barrier, policy);
    } else {
      const std::uint64_t from1 = __shfl_sync(kAllLanes, mine.from, from),
                          from2 = __shfl_sync(kAllLanes, mine.from2, from);
      const std::uint32_t bytes = __shfl_sync(kAllLanes, mine.bytes, from);
      const std::uint32_t bytes2 = __shfl_sync(kAllLanes, mine.bytes2, from);
      for (std::uint32_t i = lane * 16; i < bytes; i += 512) copy16(to + i, from1 + i);
      for (std::uint32_t i = lane * 16; i < bytes2; i += 512) copy16(to + bytes + i, from2 + i);
      arrive_with_copies(barrier);
    }
  }

  // The current stage's bytes, once they are there.
  __device__ __forceinline__ std::uint32_t wait() const {
    wait_barrier(barriers + 8 * stage, phase);
    return slots + stage * slot_bytes;
  }

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace kvq::cuda
