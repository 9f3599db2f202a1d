// What a store has done since its daemon started: kvqctl and the metrics both read this and nothing else.
//
// Invariant: plain integers that are all zero at the start and only grow. Times come from the store's callers, so they
// have the resolution of a tick.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvq/types.h"

namespace kvq {

// How long things took. The buckets sum to the count; the last one has what is above every bound.
struct TimeHistogram {
  static constexpr std::array<std::uint32_t, 15> kBoundsMs = {1,   2,    5,    10,   20,    50,    100,  200,
                                                              500, 1000, 2000, 5000, 10000, 30000, 60000};
  std::array<std::uint64_t, kBoundsMs.size() + 1> buckets{};
  std::uint64_t sum_ms = 0;

  void add(std::uint64_t ms) {
    const auto bound = std::lower_bound(kBoundsMs.begin(), kBoundsMs.end(), ms);
    ++buckets[static_cast<std::size_t>(bound - kBoundsMs.begin())];
    sum_ms += ms;
  }
};

// Relative errors. The buckets sum to the count.
struct RatioHistogram {
  static constexpr std::array<double, 12> kBounds = {0.005, 0.01, 0.02, 0.05, 0.075, 0.1,
                                                     0.125, 0.15, 0.2,  0.3,  0.5,   1};
  std::array<std::uint64_t, kBounds.size() + 1> buckets{};
  double sum = 0;

  void add(double ratio) {
    const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), ratio);
    ++buckets[static_cast<std::size_t>(bound - kBounds.begin())];
    sum += ratio;
  }
};

struct StoreCounts {
  std::uint64_t transcodes[kFormatCount][kFormatCount] = {};  // pages, by format before and after; equal: moved
  std::uint64_t transcode_failures = 0;
  std::uint64_t transcode_bytes = 0;  // written
  std::uint64_t drops = 0;            // cached pages that made room, or were not wanted any more
  std::uint64_t refusals = 0;         // requests for pages that were not met
  std::uint64_t commands_refused = 0;
  std::uint64_t slabs_created = 0, slabs_destroyed = 0;
  TimeHistogram transcode;            // from a page's start to its new place
  TimeHistogram grace_period;         // from a slot's retirement until no step could read it
  TimeHistogram step;                 // how long a session's oldest step was seen open
  std::vector<RatioHistogram> noise;  // of measured pages, by layer; as many as a model has had

  std::uint64_t all_transcodes() const {
    std::uint64_t sum = 0;
    for (const auto& from : transcodes) {
      for (const std::uint64_t pages : from) sum += pages;
    }
    return sum;
  }
};

struct TenantCounts {
  std::uint64_t lookups = 0;                     // attach calls
  std::uint64_t hits = 0;                        // those that got pages
  std::uint64_t hit_pages[kFormatCount] = {};    // that they got, by format
  std::uint64_t sealed_pages = 0, refusals = 0;  // pages computed and complete; requests not met

  std::uint64_t all_hit_pages() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t pages : hit_pages) sum += pages;
    return sum;
  }
};

}  // namespace kvq
