// What one look at kvqd shows: its documents, as the figures that top draws.
//
// Invariant: of each device the parts of `Use` sum to its arena, whatever the documents hold.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/kvqctl/tables.h"

namespace kvqctl {

// Where the bytes of an arena are. slack: free places and ends of slabs.
struct Use {
  double dense = 0, quantized = 0, limbo = 0, slack = 0, unused = 0;
  double arena() const { return dense + quantized + limbo + slack + unused; }
  Use& operator+=(const Use& more);
};

struct Counters {  // since the daemon's start
  double transcodes = 0, transcode_bytes = 0, failed = 0, dropped_pages = 0, refusals = 0, lookups = 0, hit_pages = 0;
  double computed_pages = 0;
  Counters& operator+=(const Counters& more);
};
inline constexpr double Counters::*kCounters[] = {
    &Counters::transcodes, &Counters::transcode_bytes, &Counters::failed,    &Counters::dropped_pages,
    &Counters::refusals,   &Counters::lookups,         &Counters::hit_pages, &Counters::computed_pages};

struct DeviceSample {
  std::string name, level, unwell;  // unwell: why it is degraded
  bool draining = false;
  Use use;
  std::map<std::string, double> formats;  // bytes
  double quantize_at = 0, evict_at = 0, refuse_at = 0;
  double in_flight = 0;
  Counters counters;
};

struct TenantSample {
  std::string device, name, level;
  double sessions = 0, holds = 0, quota = 0, dense = 0, quantized = 0, limbo = 0, pages = 0, cached_pages = 0;
  double hit_pages = 0;
};

struct SessionSample {
  std::string device, tenant, label, state;
  double id = 0, pid = 0, open_steps = 0, oldest_step_ms = 0, limbo = 0, pages = 0, sequences = 0, running = 0;
  double credits = 0, lost_pages = 0;
  bool hung = false;
};

struct Sample {
  std::uint64_t at_ms = 0;  // of kvqctl's clock
  std::string version;
  std::uint64_t pid = 0, uptime_ms = 0;
  double connections = 0, waiting = 0;  // requests
  std::vector<DeviceSample> devices;
  std::vector<TenantSample> tenants;
  std::vector<SessionSample> sessions;
};

// Throws nlohmann's exceptions where a document is not what this kvqctl knows.
Sample sample_of(const Json& status, const Json& sessions, std::uint64_t at_ms);

}  // namespace kvqctl
