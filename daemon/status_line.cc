// Sizes as people read them.
#include "daemon/status_line.h"

#include <cstdio>

namespace kvq {
namespace {

std::string size_text(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string device_text(const DeviceReport& device) {
  const StoreStatus& s = device.store;
  const std::uint64_t percent = s.slabs == 0 ? 0 : (s.slabs - s.slabs_free) * 100ull / s.slabs;
  return device.name + " " + std::to_string(percent) + " % of " + size_text(s.arena_bytes) + ", " +
         level_name(s.level) + (s.device.degraded ? ", DEGRADED" : "") + (s.draining ? ", draining" : "");
}

}  // namespace

std::string status_line(const NodeReport& report) {
  std::size_t sessions = 0;
  for (const DeviceReport& device : report.devices) sessions += device.sessions;
  std::string line = std::to_string(sessions) + (sessions == 1 ? " session" : " sessions");
  for (const DeviceReport& device : report.devices) line += "; " + device_text(device);
  return line;
}

}  // namespace kvq
