// When the worker's next batches start, and how much goes with them.
//
// Invariant: decided from what it is given alone: times, bytes and who waits; it reads no clock. Batches that are on
// the GPU together are one burst. Between the starts of two bursts lies the rule's pause, and a burst reads no more
// than the rule's bytes and one page, so the worker's share of the GPU is bounded whatever is submitted.
//
// Outside MPS a burst costs every process that computes one switch of contexts, about 0.4 ms whatever its size
// (docs/measurements-gpu.md): so bursts are few and as large as what has gathered. Inside MPS there is no switch, but a
// kernel of another process waits for the multiprocessors that a batch holds: so batches are small, and spread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvq::gpu {

using PaceTime = std::chrono::nanoseconds;  // since any moment that stays the same

struct PaceRule {
  std::uint64_t burst_bytes;  // of source pages
  std::uint64_t large_bytes;  // a burst of so much is large
  PaceTime pause;             // from the start of a burst to that of a large one
  PaceTime small_pause;       // to that of a smaller one
  PaceTime urgent_pause;      // to that of any while somebody waits for memory
  PaceTime gather;            // how long a first job waits for those that were handed out with it
};

// `gpu_bytes_per_s`: of the GPU's memory; 0: unknown. A burst reads a 45th of what the memory could give in a pause:
// with what it writes, about 3 % of the time. On an H200 that is 2.7 GB every 25 ms or 133 MB every 1.25 ms, 107 GB/s.
inline PaceRule pace_rule(bool in_mps, std::uint64_t gpu_bytes_per_s) {
  using namespace std::chrono_literals;
  constexpr std::uint64_t kH200BytesPerS = 4'800'000'000'000;
  const std::uint64_t bytes_per_s = gpu_bytes_per_s != 0 ? gpu_bytes_per_s : kH200BytesPerS;
  const auto burst = [&](PaceTime pause) {
    return bytes_per_s / 45 * static_cast<std::uint64_t>(pause.count()) / 1'000'000'000;
  };
  if (in_mps) return {burst(1250us), 0, 1250us, 1250us, 0ns, 0ns};
  // 0.4 ms in 25 are 1.6 %. Little is worth one in 100 only. One in 3 is what those who wait cost the others.
  return {burst(25ms), 128 << 20, 25ms, 100ms, 3ms, 1ms};
}

class BatchPace {
 public:
  struct Waiting {
    std::uint64_t bytes = 0;  // of source pages; 0: nothing waits
    PaceTime oldest{};        // when the first of it was submitted
    bool urgent = false;      // somebody waits for memory
  };

  explicit BatchPace(const PaceRule& rule) : rule_(rule) {}

  // How many bytes may be launched now: with a new burst when one is due, else with the one that runs. 0: none.
  std::uint64_t room(PaceTime now, const Waiting& waiting, bool runs) {
    if (waiting.bytes == 0) return 0;
    if (now >= due(waiting)) {
      began_ = now;
      left_ = rule_.burst_bytes;
    } else if (!runs) {
      left_ = 0;
    }
    return left_;
  }
  void launched(std::uint64_t bytes) { left_ -= std::min(left_, bytes); }

  // When the next burst may begin for what waits.
  PaceTime due(const Waiting& waiting) const {
    if (waiting.urgent) return began_ + rule_.urgent_pause;
    const PaceTime pause = waiting.bytes >= rule_.large_bytes ? rule_.pause : rule_.small_pause;
    return std::max(began_ + pause, waiting.oldest + rule_.gather);
  }

 private:
  const PaceRule rule_;
  PaceTime began_ = -std::chrono::hours(1);  // the first burst waits for none before it
  std::uint64_t left_ = 0;                   // of the burst's bytes
};

}  // namespace kvq::gpu
