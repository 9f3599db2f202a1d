// When the store's tick runs.
//
// Invariant: while a session exists there is a tick at least every `interval_ms`; while the store makes progress one
// every millisecond; never two within one millisecond; and none at all when nothing is left to do.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <functional>

#include "daemon/event_loop.h"
#include "daemon/store.h"

namespace kvq {

class Ticker final : private kj::TaskSet::ErrorHandler {
 public:
  // `after` runs behind each tick: parked requests, notices.
  Ticker(EventLoop& loop, Store& store, std::uint32_t interval_ms,
         std::function<void(std::uint64_t now_ms, const TickReport& report)> after);

  // Something changed: tick in the loop's next turn (or the next millisecond, if one just ran).
  void soon();
  // Whether a session exists.
  void keep_going(bool active);

  std::uint64_t ticks() const { return ticks_; }

 private:
  void tick();
  void arm(std::uint32_t interval_ms);
  void taskFailed(kj::Exception&& exception) override;

  EventLoop& loop_;
  Store& store_;
  const std::uint32_t interval_ms_;
  std::function<void(std::uint64_t, const TickReport&)> after_;
  EventLoop::Watch watch_;
  std::uint32_t armed_ms_ = 0;  // interval of `watch_`, 0: not armed
  bool active_ = false;
  bool asked_ = false;   // a tick is queued for the next turn
  bool wanted_ = false;  // one is wanted in the next millisecond
  std::uint64_t last_ms_ = 0;
  std::uint64_t ticks_ = 0;
  kj::TaskSet queued_;
};

}  // namespace kvq
