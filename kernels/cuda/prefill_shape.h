// The fixed shape of the kernels for many query rows, for the host that launches them and for the device.
//
// Invariant: a *unit* is a block of threads here, one for each multiprocessor; a tile has 64 rows for each consumer
// warpgroup. Consumers first, producers behind them, then a warpgroup of which one warp looks pages up and asks for
// them. In shared memory: the records, stages of keys, stages of values, the consumers' queries (all rows of 128 bytes,
// see prefill_mma.cuh), the ring of raw blocks.
#pragma once

#include "kernels/cuda/attend_params.h"

namespace kvq::cuda {

inline constexpr std::uint32_t kGroupRows = 64;      // of a consumer warpgroup
inline constexpr std::uint32_t kGroupThreads = 128;  // of a warpgroup
inline constexpr std::uint32_t kMaxRawSlots = 12;
inline constexpr std::uint32_t kRecordBytes = 4096;  // of PrefillRecords, and what aligns the stages

template <std::uint32_t kD_, std::uint32_t kConsumers_>
struct PrefillShape {
  static constexpr std::uint32_t kD = kD_, kConsumers = kConsumers_;
  static constexpr std::uint32_t kProducers = 2;
  static constexpr std::uint32_t kThreads = (kConsumers + kProducers + 1) * kGroupThreads;
  static constexpr std::uint32_t kRows = kGroupRows * kConsumers;
  static constexpr std::uint32_t kHalves = kD / 64;
  static constexpr std::uint32_t kHalfBytes = kPageTokens * 128;  // 64 channels of a page's keys or values
  static constexpr std::uint32_t kStageBytes = kHalves * kHalfBytes;
  static constexpr std::uint32_t kStages = kD == 64 ? 6 : 4;  // a multiple of kProducers
  static constexpr std::uint32_t kRingAt = 2 * kStages * kStageBytes + kConsumers * kHalves * kGroupRows * 128;
  // Registers of a thread. The warpgroups share what they were launched with, or one of them waits for ever.
  static constexpr std::uint32_t kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr std::uint32_t kConsumerRegisters = kConsumers == 1 ? 216 : 160;
  static constexpr std::uint32_t kProducerRegisters = kConsumers == 1 ? 96 : 64;
  static constexpr std::uint32_t kStreamRegisters = kConsumers == 1 ? 96 : 32;
  static_assert(kConsumers * kConsumerRegisters + kProducers * kProducerRegisters + kStreamRegisters <=
                kThreads / kGroupThreads * kLaunchRegisters);
};

KVQ_HD constexpr std::uint32_t prefill_threads(bool many) {
  return many ? PrefillShape<64, 2>::kThreads : PrefillShape<64, 1>::kThreads;
}
// Rows of a tile: one consumer warpgroup while the rows of a call fit it, and the history is all that costs.
KVQ_HD constexpr std::uint32_t prefill_rows(bool many) { return kGroupRows * (many ? 2 : 1); }

#if defined(KVQ_CUDA_HAS_90A)
inline constexpr bool kHasWarpgroups = true;
#else
inline constexpr bool kHasWarpgroups = false;  // this build has no code for sm_90a
#endif
// Rows of a KV head up to which a warp for each page is taken: faster up to 32 on int4 pages, on dense ones up to 16.
inline constexpr std::uint32_t kFewRows = 24;

struct PrefillVariant {
  Dtype dtype;
  bool many;   // two consumer warpgroups
  bool plain;  // no soft cap, no ALiBi
};
using PrefillKernel = void (*)(AttendParams);

// Null where this build has none.
PrefillKernel prefill_d64(const PrefillVariant& variant);
PrefillKernel prefill_d128(const PrefillVariant& variant);

// Bytes of shared memory before the ring of raw blocks.
constexpr std::uint32_t prefill_ring_at(std::uint32_t d, bool many) {
  if (d == 64) return kRecordBytes + (many ? PrefillShape<64, 2>::kRingAt : PrefillShape<64, 1>::kRingAt);
  return kRecordBytes + (many ? PrefillShape<128, 2>::kRingAt : PrefillShape<128, 1>::kRingAt);
}

}  // namespace kvq::cuda
