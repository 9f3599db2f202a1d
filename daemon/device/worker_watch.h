// When a worker counts as stuck, and when the next one is started.
//
// Invariant: time in which kvqd did not look is not held against the worker, so a machine or a kvqd that was stopped
// kills nobody. Pauses double from the first to the longest while workers keep ending, and begin anew once one has
// worked for the longest pause.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvq {

class WorkerWatch {
 public:
  WorkerWatch(std::uint32_t deadline_ms, std::uint32_t first_pause_ms, std::uint32_t longest_pause_ms)
      : deadline_ms_(deadline_ms),
        first_ms_(first_pause_ms),
        longest_ms_(longest_pause_ms),
        pause_ms_(first_pause_ms) {}

  void started(std::uint64_t now_ms) {
    last_look_ms_ = started_ms_ = now_ms;
    stood_ms_ = beats_ = 0;
  }
  // Whether the loop whose beats these are has stood still for the deadline.
  bool stuck(std::uint64_t now_ms, std::uint64_t beats) {
    const std::uint64_t since_ms = now_ms - std::min(now_ms, last_look_ms_);
    stood_ms_ = beats == beats_ ? stood_ms_ + std::min(since_ms, look_ms()) : 0;
    beats_ = beats;
    last_look_ms_ = now_ms;
    return stood_ms_ >= deadline_ms_;
  }
  // How often to look.
  std::uint64_t look_ms() const { return std::max<std::uint64_t>(deadline_ms_ / 4, 1); }

  // The worker has ended: when to start the next.
  std::uint64_t next_start_ms(std::uint64_t now_ms) {
    if (now_ms - std::min(now_ms, started_ms_) >= longest_ms_) pause_ms_ = first_ms_;
    const std::uint64_t at = now_ms + pause_ms_;
    pause_ms_ = std::min(pause_ms_ * 2, longest_ms_);
    return at;
  }

 private:
  const std::uint64_t deadline_ms_, first_ms_, longest_ms_;
  std::uint64_t pause_ms_;
  std::uint64_t started_ms_ = 0, last_look_ms_ = 0, stood_ms_ = 0, beats_ = 0;
};

}  // namespace kvq
