// One line says how it is, device by device.
#include "daemon/status_line.h"

#include <gtest/gtest.h>

namespace kvq {
namespace {

DeviceReport device(const std::string& name, std::uint32_t slabs_free, PressureLevel level) {
  DeviceReport out;
  out.name = name;
  out.sessions = 1;
  out.store.slabs = 64;
  out.store.slabs_free = slabs_free;
  out.store.arena_bytes = 16ull << 30;
  out.store.level = level;
  return out;
}

TEST(StatusLine, SaysHowFullEachDeviceIsAndWhatIsWrong) {
  NodeReport report;
  report.devices = {device("host", 30, PressureLevel::quantize)};
  EXPECT_EQ(status_line(report), "1 session; host 53 % of 16.0 GiB, quantize");
  report.devices.push_back(device("GPU-1", 0, PressureLevel::refuse));
  report.devices[1].store.device.degraded = true;
  report.devices[1].store.draining = true;
  EXPECT_EQ(status_line(report),
            "2 sessions; host 53 % of 16.0 GiB, quantize; GPU-1 100 % of 16.0 GiB, refuse, DEGRADED, draining");
}

TEST(StatusLine, ADeviceWithoutSlabsIsEmpty) {
  NodeReport report;
  report.devices = {device("host", 0, PressureLevel::calm)};
  report.devices[0].store.slabs = 0;
  report.devices[0].sessions = 0;
  report.devices[0].store.arena_bytes = 512;
  EXPECT_EQ(status_line(report), "0 sessions; host 0 % of 512 B, calm");
}

}  // namespace
}  // namespace kvq
