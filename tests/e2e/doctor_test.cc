// What the doctor says of machines that are described here.
#include <gmock/gmock.h>

#include "tools/kvqctl/doctor_findings.h"

namespace kvqctl {
namespace {

using ::testing::HasSubstr;

Json status_of(const std::string& level = "calm") {
  return {{"version", "0.1.0"},
          {"pid", 77},
          {"uptime_ms", 60'000},
          {"not_served", Json::array()},
          {"device", "host"},
          {"level", level},
          {"arena", {{"bytes", 1 << 30}}},
          {"device_health", {{"state", "ok"}, {"text", ""}, {"uuid", ""}}},
          {"verify", {{"pages_bad_ever", 0}}}};
}

Facts sound() {
  Facts f;
  f.socket = "/run/kvq/kvqd.sock";
  f.user = "ada";
  f.socket_folder = f.socket_exists = f.socket_is_one = f.socket_writable = f.in_socket_group = true;
  f.socket_group = "kvq";
  f.status = status_of();
  f.open_files = 131'072;
  f.locked_bytes = UINT64_MAX;
  f.memory_bytes = 64ull << 30;
  f.available_bytes = 32ull << 30;
  f.driver = "580.65.06";
  f.nodes = {{"/dev/nvidia0", true}};
  f.uvm_node = f.control_node = f.persistence = true;
  f.clock_source = "tsc";
  f.governor = "performance";
  return f;
}

TEST(Doctor, FindsNothingOnASoundMachine) {
  const auto findings = findings_of(sound());
  EXPECT_FALSE(any_bad(findings));
  EXPECT_EQ(document_of(findings)["ok"], true);
  for (const Finding& f : findings) EXPECT_EQ(f.verdict, Verdict::ok) << f.check << ": " << f.text;
  EXPECT_EQ(findings.size(), 11u);
}

struct Ill {
  const char* what;
  void (*spoil)(Facts&);
  Verdict verdict;
  const char *check, *text, *fix;
};

class Illness : public ::testing::TestWithParam<Ill> {};

TEST_P(Illness, IsFoundAloneAndHasAFix) {
  Facts facts = sound();
  GetParam().spoil(facts);
  const auto findings = findings_of(facts);
  std::size_t found = 0;
  for (const Finding& f : findings) {
    EXPECT_EQ(f.verdict == Verdict::ok, f.fix.empty()) << f.check;
    if (f.verdict == Verdict::ok) continue;
    ++found;
    EXPECT_EQ(f.verdict, GetParam().verdict) << f.text;
    EXPECT_EQ(f.check, GetParam().check);
    EXPECT_THAT(f.text, HasSubstr(GetParam().text));
    EXPECT_THAT(f.fix, HasSubstr(GetParam().fix));
    EXPECT_THAT(show_findings(findings), HasSubstr("fix: " + f.fix));
  }
  EXPECT_EQ(found, 1u);
  EXPECT_EQ(any_bad(findings), GetParam().verdict == Verdict::bad);
}

// clang-format off
INSTANTIATE_TEST_SUITE_P(Doctor, Illness, ::testing::Values(
    Ill{"no_folder", [](Facts& f) { f.socket_folder = f.socket_exists = false; f.status.reset(); }, Verdict::bad, "socket", "folder", "kvqd.socket"},
    Ill{"no_socket", [](Facts& f) { f.socket_exists = false; f.status.reset(); }, Verdict::bad, "socket", "does not exist", "KVQ_SOCKET"},
    Ill{"a_file", [](Facts& f) { f.socket_is_one = false; f.status.reset(); }, Verdict::bad, "socket", "is no socket", "remove"},
    Ill{"no_member", [](Facts& f) { f.socket_writable = f.in_socket_group = false; f.status.reset(); }, Verdict::bad, "socket", "ada may not connect", "usermod -aG kvq ada"},
    Ill{"old_login", [](Facts& f) { f.socket_writable = f.in_socket_group = false; f.listed_in_socket_group = true; f.status.reset(); }, Verdict::bad, "socket", "older", "newgrp kvq"},
    Ill{"no_daemon", [](Facts& f) { f.status.reset(); f.no_daemon = "no daemon at x"; }, Verdict::bad, "kvqd", "no daemon at x", "journalctl"},
    Ill{"not_served", [](Facts& f) { (*f.status)["not_served"] = Json::array({{{"uuid", "GPU-a"}, {"text", "too small"}}}); }, Verdict::warn, "kvqd", "too small", "restart"},
    Ill{"degraded", [](Facts& f) { (*f.status)["device_health"]["state"] = "degraded"; (*f.status)["device_health"]["text"] = "the worker died"; }, Verdict::bad, "device host", "the worker died", "journalctl"},
    Ill{"damaged", [](Facts& f) { (*f.status)["verify"]["pages_bad_ever"] = 3; }, Verdict::bad, "device host", "3 pages were damaged", "verify"},
    Ill{"full", [](Facts& f) { f.status = status_of("refuse"); }, Verdict::bad, "device host", "full", "kvqctl tenants"},
    Ill{"short_of_room", [](Facts& f) { f.status = status_of("evict"); }, Verdict::warn, "device host", "dropped", "enlarge"},
    Ill{"few_files", [](Facts& f) { f.open_files = 1024; }, Verdict::warn, "limit of open files", "1024", "LimitNOFILE"},
    Ill{"little_lockable", [](Facts& f) { f.locked_bytes = 8 << 20; }, Verdict::warn, "limit of locked memory", "8.0 MiB of an arena of 1.0 GiB", "LimitMEMLOCK"},
    Ill{"swapped", [](Facts& f) { f.swap_used_bytes = 1 << 30; }, Verdict::warn, "memory", "1.0 GiB swapped", "lock_memory"},
    Ill{"no_memory", [](Facts& f) { f.available_bytes = 1 << 30; }, Verdict::warn, "memory", "1.0 GiB available", "smaller"},
    Ill{"no_uvm", [](Facts& f) { f.uvm_node = false; }, Verdict::bad, "GPU", "/dev/nvidia-uvm is not there", "nvidia-modprobe"},
    Ill{"no_control", [](Facts& f) { f.control_node = false; }, Verdict::bad, "GPU", "/dev/nvidiactl is not there", "container"},
    Ill{"no_rights", [](Facts& f) { f.nodes[0].readable_and_writable = false; }, Verdict::bad, "GPU", "ada may not use /dev/nvidia0", "chmod"},
    Ill{"no_driver", [](Facts& f) { f.driver.clear(); }, Verdict::bad, "GPU", "no driver", "modprobe nvidia"},
    Ill{"no_persistence", [](Facts& f) { f.persistence = false; }, Verdict::warn, "persistence", "takes seconds", "nvidia-smi -pm 1"},
    Ill{"mps", [](Facts& f) { f.mps = true; }, Verdict::warn, "MPS", "takes the others", "quit"},
    Ill{"slow_clock", [](Facts& f) { f.clock_source = "hpet"; }, Verdict::warn, "clock", "hpet", "clocksource=tsc"},
    Ill{"powersave", [](Facts& f) { f.governor = "powersave"; }, Verdict::warn, "processor's clock", "powersave", "performance"}),
    [](const auto& info) { return std::string(info.param.what); });
// clang-format on

TEST(Doctor, AHostWithoutGpuIsSound) {
  Facts facts = sound();
  facts.driver.clear();
  facts.nodes.clear();
  facts.uvm_node = facts.control_node = facts.persistence = false;
  for (const Finding& f : findings_of(facts)) EXPECT_EQ(f.verdict, Verdict::ok) << f.check << ": " << f.text;
}

TEST(Doctor, EachDeviceIsLookedAt) {
  Facts facts = sound();
  Json a = status_of(), b = status_of("refuse");
  a["device_health"]["uuid"] = "GPU-a";
  b["device_health"]["uuid"] = "GPU-b";
  (*facts.status)["devices"] = Json::array({a, b});
  const std::string shown = show_findings(findings_of(facts));
  EXPECT_THAT(shown, HasSubstr("ok    device GPU-a: level calm"));
  EXPECT_THAT(shown, HasSubstr("BAD   device GPU-b: the arena is full"));
}

}  // namespace
}  // namespace kvqctl
