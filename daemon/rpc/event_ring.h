// The last events, for kvqctl events.
//
// Invariant: at most kMost lines of at most kLineBytes each. Numbers start at 1 and have no gap, so a reader knows what
// it has missed.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

namespace kvq {

struct Event {
  std::uint64_t number = 0, at_ms = 0;  // of the loop's clock
  std::string line;                     // "event=NAME key=value ..."
};

class EventRing {
 public:
  static constexpr std::size_t kMost = 1000, kLineBytes = 1024;

  void add(std::string line, std::uint64_t now_ms) {
    if (line.size() > kLineBytes) line.resize(kLineBytes);
    events_.push_back({++last_, now_ms, std::move(line)});
    if (events_.size() > kMost) events_.pop_front();
  }

  const std::deque<Event>& events() const { return events_; }  // oldest first
  std::uint64_t last() const { return last_; }                 // number of the newest; 0: there was none

 private:
  std::deque<Event> events_;
  std::uint64_t last_ = 0;
};

}  // namespace kvq
