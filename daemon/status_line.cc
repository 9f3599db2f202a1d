// One part for each device, named where there are several.
#include "daemon/status_line.h"

#include <cstdio>

#include "daemon/core/pressure.h"

namespace kvq {
namespace {

std::string size_text(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string device_text(const DeviceReport& device) {
  const StoreStatus& store = device.store;
  const std::uint64_t used = store.slabs - store.slabs_free;
  const std::uint64_t percent = store.slabs == 0 ? 0 : 100 * used / store.slabs;
  std::string text = std::to_string(percent) + " % of " + size_text(store.arena_bytes) + " in use, " +
                     name(store.level) + ", " + std::to_string(device.sessions) +
                     (device.sessions == 1 ? " session" : " sessions");
  if (device.parked > 0) text += ", " + std::to_string(device.parked) + " waiting for room";
  if (store.draining) text += ", draining";
  if (store.device.degraded) text += ", DEGRADED: " + store.device.text;
  return text;
}

}  // namespace

std::string figures_text(const NodeReport& report) {
  std::string text;
  for (const DeviceReport& device : report.devices) {
    text += (text.empty() ? "" : "; ") + (report.devices.size() > 1 ? device.name + ": " : std::string()) +
            device_text(device);
  }
  return text;
}

}  // namespace kvq
