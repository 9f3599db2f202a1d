// Pace of the ticks: 1 ms while something moves, doubling up to the configured interval while the store only waits.
#include "daemon/rpc/ticker.h"

#include <kj/debug.h>

#include <algorithm>

namespace kvq {
namespace {

bool moved(const TickReport& r) {
  return (r.commands | r.transcodes_done | r.transcodes_failed | r.submitted | r.dropped_pages | r.reaped_slots |
          r.slabs_created | r.slabs_destroyed) != 0;
}

}  // namespace

Ticker::Ticker(EventLoop& loop, Store& store, std::uint32_t interval_ms,
               std::function<void(std::uint64_t, const TickReport&)> after)
    : loop_(loop), store_(store), interval_ms_(interval_ms), after_(std::move(after)), queued_(*this) {}

void Ticker::soon() {
  if (asked_) return;
  if (loop_.now_ms() == last_ms_) {
    wanted_ = true;
    arm(1);
    return;
  }
  asked_ = true;
  queued_.add(kj::evalLater([this] {
    if (asked_) tick();
  }));
}

void Ticker::keep_going(bool active) {
  active_ = active;
  if (active_ && armed_ms_ == 0) arm(interval_ms_);
}

void Ticker::tick() {
  asked_ = wanted_ = false;
  ++ticks_;
  last_ms_ = loop_.now_ms();
  const TickReport report = store_.tick(last_ms_);
  after_(last_ms_, report);
  std::uint32_t next_ms = active_ ? interval_ms_ : 0;
  if (wanted_) {
    next_ms = 1;  // what `after_` did came too late for this report
  } else if (report.busy) {
    next_ms = moved(report) ? 1 : std::clamp(armed_ms_ * 2, 1u, interval_ms_);
  }
  arm(next_ms);
}

void Ticker::arm(std::uint32_t interval_ms) {
  if (interval_ms == armed_ms_) return;
  armed_ms_ = interval_ms;
  if (interval_ms == 0) {
    watch_.cancel();
  } else {
    watch_ = loop_.every(interval_ms, [this] { tick(); });
  }
}

// tick() throws nothing that could be handled: the process state is unknown, so the daemon ends.
void Ticker::taskFailed(kj::Exception&& exception) {
  KJ_LOG(FATAL, "the tick failed", exception);
  std::abort();
}

}  // namespace kvq
