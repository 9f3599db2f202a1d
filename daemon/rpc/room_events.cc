// Sums of tick reports.
#include "daemon/rpc/room_events.h"

#include "daemon/rpc/report.h"

namespace kvq {
namespace {

constexpr std::uint64_t kEveryMs = 1000;

}  // namespace

void RoomEvents::add(const TickReport& report, std::uint64_t now_ms) {
  quantized_ += report.transcodes_done;
  failed_ += report.transcodes_failed;
  dropped_ += report.dropped_pages;
  if (quantized_ + failed_ + dropped_ == 0 || (told_ms_ != 0 && now_ms - told_ms_ < kEveryMs)) return;
  log_("event=made_room device=" + device_ + " level=" + level_name(report.level) +
       " pages_rewritten=" + std::to_string(quantized_) + " pages_failed=" + std::to_string(failed_) +
       " pages_dropped=" + std::to_string(dropped_));
  quantized_ = failed_ = dropped_ = 0;
  told_ms_ = now_ms;
}

}  // namespace kvq
