// What `systemctl status` says of a node: each figure is in its place, and what is wrong is said.
#include "daemon/status_line.h"

#include <gtest/gtest.h>

namespace kvq {
namespace {

DeviceReport device(const char* name, std::uint32_t slabs, std::uint32_t free) {
  DeviceReport out{.name = name};
  out.store.arena_bytes = slabs * (64ull << 20);
  out.store.slabs = slabs;
  out.store.slabs_free = free;
  return out;
}

TEST(StatusLine, HasUseLevelAndSessions) {
  NodeReport report{.devices = {device("host", 64, 48)}};
  report.devices[0].store.level = PressureLevel::quantize;
  report.devices[0].sessions = 1;
  EXPECT_EQ(figures_text(report), "25 % of 4.0 GiB in use, quantize, 1 session");
}

TEST(StatusLine, TellsWhoWaitsAndWhatIsWrong) {
  NodeReport report{.devices = {device("host", 1, 0)}};
  report.devices[0].parked = 3;
  report.devices[0].store.draining = true;
  report.devices[0].store.device = {.degraded = true, .text = "its worker is away"};
  EXPECT_EQ(figures_text(report),
            "100 % of 64.0 MiB in use, calm, 0 sessions, 3 waiting for room, draining, DEGRADED: its worker is away");
}

TEST(StatusLine, NamesDevicesWhereThereAreSeveral) {
  EXPECT_EQ(figures_text({.devices = {device("GPU-a", 16, 16), device("GPU-b", 16, 8)}}),
            "GPU-a: 0 % of 1.0 GiB in use, calm, 0 sessions; GPU-b: 50 % of 1.0 GiB in use, calm, 0 sessions");
}

}  // namespace
}  // namespace kvq
