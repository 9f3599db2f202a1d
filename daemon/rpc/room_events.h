// What the ticks decided, as events: one line a second at most, however many pages it is about.
//
// Invariant: every decision is counted in exactly one line; those of the last second wait for the next tick.
#pragma once

#include <functional>
#include <string>

#include "daemon/store.h"

namespace kvq {

class RoomEvents {
 public:
  using Log = std::function<void(const std::string& line)>;
  RoomEvents(Log log, std::string device) : log_(std::move(log)), device_(std::move(device)) {}

  void add(const TickReport& report, std::uint64_t now_ms);

 private:
  const Log log_;
  const std::string device_;
  std::uint64_t quantized_ = 0, failed_ = 0, dropped_ = 0;
  std::uint64_t told_ms_ = 0;
};

}  // namespace kvq
