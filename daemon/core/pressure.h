// Pressure: watermarks with hysteresis turn a share of memory in use into a level.
//
// Invariant: a level starts at its watermark and ends only `relief` below it, so that usage near a watermark does not
// make the level flap.
#pragma once

#include "kvq/types.h"

namespace kvq {

constexpr const char* level_name(PressureLevel level) {
  constexpr const char* kNames[] = {"calm", "quantize", "evict", "refuse"};
  return kNames[static_cast<int>(level)];
}

struct Watermarks {
  // Shares of the arena's slabs (the transcode reserve left out) that are in use; also applied to each tenant's quota.
  double quantize_at = 0.60;
  double evict_at = 0.85;
  double refuse_at = 0.97;
  double relief = 0.05;  // a level ends when usage is this much below its start
};

// True when 0 < relief < quantize_at <= evict_at <= refuse_at <= 1.
constexpr bool valid(const Watermarks& w) {
  return w.relief > 0 && w.relief < w.quantize_at && w.quantize_at <= w.evict_at && w.evict_at <= w.refuse_at &&
         w.refuse_at <= 1;
}

constexpr double start_of(PressureLevel level, const Watermarks& w) {
  return level == PressureLevel::refuse     ? w.refuse_at
         : level == PressureLevel::evict    ? w.evict_at
         : level == PressureLevel::quantize ? w.quantize_at
                                            : 0.0;
}

constexpr PressureLevel next_level(PressureLevel now, double usage, const Watermarks& w) {
  PressureLevel level = PressureLevel::calm;
  for (auto candidate : {PressureLevel::quantize, PressureLevel::evict, PressureLevel::refuse}) {
    const double start = start_of(candidate, w);
    if (usage >= start || (candidate <= now && usage > start - w.relief)) level = candidate;
  }
  return level;
}

constexpr const char* name(PressureLevel level) {
  constexpr const char* kNames[] = {"calm", "quantize", "evict", "refuse"};
  return kNames[static_cast<std::size_t>(level)];
}

}  // namespace kvq
