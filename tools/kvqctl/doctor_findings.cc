// One function for each thing that may be wrong.
#include "tools/kvqctl/doctor_findings.h"

#include <algorithm>

#include "tools/kvqctl/text.h"

namespace kvqctl {
namespace {

constexpr std::uint64_t kFewFiles = 4096;  // slabs, sessions and sockets of a small node

Finding socket(const Facts& f) {
  if (!f.socket_folder) {
    return {"socket", Verdict::bad, "the folder of " + f.socket + " does not exist",
            "systemctl enable --now kvqd.socket; or create the folder, owned by kvqd's user"};
  }
  if (!f.socket_exists) {
    return {"socket", Verdict::bad, f.socket + " does not exist",
            "systemctl enable --now kvqd.socket; or name another with --socket or KVQ_SOCKET"};
  }
  if (!f.socket_is_one) {
    return {"socket", Verdict::bad, f.socket + " is no socket", "remove the file, then systemctl restart kvqd.socket"};
  }
  if (f.socket_writable) return {"socket", Verdict::ok, f.socket + ", of group " + f.socket_group, ""};
  if (f.listed_in_socket_group && !f.in_socket_group) {
    return {"socket", Verdict::bad, f.user + " is in group " + f.socket_group + ", but this login is older than that",
            "log in again, or run: newgrp " + f.socket_group};
  }
  return {"socket", Verdict::bad, f.user + " may not connect to " + f.socket + ", of group " + f.socket_group,
          "as root: usermod -aG " + f.socket_group + " " + f.user + ", then log in again"};
}

Finding daemon(const Facts& f) {
  if (!f.no_daemon.empty()) {
    return {"kvqd", Verdict::bad, f.no_daemon, "systemctl status kvqd; journalctl -u kvqd says why it ended"};
  }
  const Json& s = *f.status;
  const std::string text = "version " + s.at("version").get<std::string>() + ", pid " + s.at("pid").dump() + ", up " +
                           duration(s.at("uptime_ms").get<std::uint64_t>());
  if (!s.at("not_served").empty()) {
    return {"kvqd", Verdict::warn,
            "a GPU is not served: " + ascii(s.at("not_served").front().at("text").get<std::string>()),
            "mend what the text names, then systemctl restart kvqd"};
  }
  return {"kvqd", Verdict::ok, text, ""};
}

// What stands still or is damaged on a device.
Finding device(const Json& d) {
  const Json& health = d.at("device_health");
  const std::string uuid = health.at("uuid"),
                    name = "device " + (uuid.empty() ? d.at("device").get<std::string>() : uuid);
  const auto bad_pages = d.at("verify").at("pages_bad_ever").get<std::uint64_t>();
  if (health.at("state") != "ok") {
    return {name, Verdict::bad, "degraded: " + ascii(health.at("text").get<std::string>()),
            "journalctl -u kvqd; nvidia-smi -q; docs/operations.md, The GPU and its worker"};
  }
  if (bad_pages > 0) {
    return {name, Verdict::bad, std::to_string(bad_pages) + " pages were damaged",
            "test the machine's memory; kvqctl verify"};
  }
  if (d.at("level") == "refuse") {
    return {name, Verdict::bad, "the arena is full: new pages are refused",
            "kvqctl tenants shows who holds what; lower a quota, end a server, or enlarge the arena"};
  }
  if (d.at("level") == "evict") {
    return {name, Verdict::warn, "the arena is short: cached pages are dropped",
            "enlarge the arena, or lower the load"};
  }
  return {name, Verdict::ok, "level " + d.at("level").get<std::string>(), ""};
}

Finding open_files(const Facts& f) {
  if (!f.open_files)
    return {"limit of open files", Verdict::ok, "not to be seen from here; kvqd checks it at its start", ""};
  const std::string text = "kvqd may open " + std::to_string(*f.open_files) + " files";
  if (*f.open_files >= kFewFiles) return {"limit of open files", Verdict::ok, text, ""};
  return {"limit of open files", Verdict::warn, text,
          "LimitNOFILE=131072 in kvqd.service; elsewhere ulimit -n before kvqd starts"};
}

Finding locked_memory(const Facts& f) {
  if (!f.locked_bytes || !f.status) {
    return {"limit of locked memory", Verdict::ok, "not to be seen from here; matters for lock_memory alone", ""};
  }
  double arena = 0;
  if (f.status->contains("arena")) arena = f.status->at("arena").at("bytes").get<double>();
  const std::string text = *f.locked_bytes == UINT64_MAX
                               ? std::string("none")
                               : "kvqd may lock " + bytes_text(static_cast<double>(*f.locked_bytes));
  if (f.status->value("device", "") != "host" || static_cast<double>(*f.locked_bytes) >= arena) {
    return {"limit of locked memory", Verdict::ok, text, ""};
  }
  return {"limit of locked memory", Verdict::warn,
          text + " of an arena of " + bytes_text(arena) + ": lock_memory would be refused",
          "LimitMEMLOCK=infinity in kvqd.service"};
}

Finding memory(const Facts& f) {
  const std::string text = bytes_text(static_cast<double>(f.available_bytes)) + " available of " +
                           bytes_text(static_cast<double>(f.memory_bytes));
  if (f.swap_used_bytes > 0) {
    return {"memory", Verdict::warn, text + ", " + bytes_text(static_cast<double>(f.swap_used_bytes)) + " swapped out",
            "pages that are swapped are slow: lock_memory = true, or a smaller arena, or more memory"};
  }
  if (f.available_bytes < f.memory_bytes / 20) {
    return {"memory", Verdict::warn, text,
            "end what needs memory, or make the arena smaller: the kernel kills processes next"};
  }
  return {"memory", Verdict::ok, text, ""};
}

Finding gpu(const Facts& f) {
  if (f.driver.empty() && f.nodes.empty())
    return {"GPU", Verdict::ok, "no NVIDIA driver here: kvqd serves the host's memory", ""};
  if (f.driver.empty()) {
    return {"GPU", Verdict::bad, "device nodes but no driver is loaded",
            "modprobe nvidia; dmesg | grep -i nvrm says why it fails"};
  }
  if (f.nodes.empty() || !f.control_node || !f.uvm_node) {
    const char* absent = f.nodes.empty() ? "/dev/nvidia0" : !f.control_node ? "/dev/nvidiactl" : "/dev/nvidia-uvm";
    return {"GPU", Verdict::bad, "driver " + f.driver + ", but " + absent + " is not there",
            "nvidia-modprobe -c0 -u; in a container pass the device nodes (--gpus all)"};
  }
  for (const Node& node : f.nodes) {
    if (!node.readable_and_writable) {
      return {"GPU", Verdict::bad, f.user + " may not use " + node.path,
              "chmod 0666 " + node.path +
                  ", or add the user to its group (NVreg_DeviceFileMode of the driver makes it last)"};
    }
  }
  return {"GPU", Verdict::ok, "driver " + f.driver + ", device nodes can be used", ""};
}

Finding persistence(const Facts& f) {
  if (f.persistence) return {"persistence", Verdict::ok, "nvidia-persistenced runs", ""};
  return {"persistence", Verdict::warn, "nvidia-persistenced does not run: each first use of an idle GPU takes seconds",
          "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1"};
}

Finding mps(const Facts& f) {
  if (!f.mps) return {"MPS", Verdict::ok, "not in use: a server that faults hurts no other", ""};
  return {"MPS", Verdict::warn,
          "in use: a server that faults or is killed in mid-kernel takes the others' contexts with it",
          "a trade for throughput; without it: echo quit | nvidia-cuda-mps-control"};
}

Finding clock(const Facts& f) {
  if (f.clock_source.empty()) return {"clock", Verdict::ok, "not to be seen here", ""};
  const bool quick = f.clock_source == "tsc" || f.clock_source == "kvm-clock" ||
                     f.clock_source == "hyperv_clocksource_tsc_page" || f.clock_source == "arch_sys_counter";
  if (quick) return {"clock", Verdict::ok, f.clock_source, ""};
  return {"clock", Verdict::warn, f.clock_source + ": reading the time is a system call",
          "boot with clocksource=tsc, if dmesg calls the TSC stable"};
}

Finding governor(const Facts& f) {
  if (f.governor.empty()) return {"processor's clock", Verdict::ok, "not to be seen here", ""};
  if (f.governor != "powersave") return {"processor's clock", Verdict::ok, "governor " + f.governor, ""};
  return {"processor's clock", Verdict::warn, "governor powersave: transcodes and first steps are slow",
          "cpupower frequency-set -g performance"};
}

const char* name(Verdict verdict) { return verdict == Verdict::ok ? "ok" : verdict == Verdict::warn ? "warn" : "bad"; }

}  // namespace

std::vector<Finding> findings_of(const Facts& f) {
  std::vector<Finding> out = {socket(f)};
  if (f.status || !f.no_daemon.empty()) out.push_back(daemon(f));
  if (f.status && f.status->contains("devices")) {
    for (const Json& d : f.status->at("devices")) out.push_back(device(d));
  } else if (f.status) {
    out.push_back(device(*f.status));
  }
  for (Finding (*check)(const Facts&) : {open_files, locked_memory, memory, gpu}) out.push_back(check(f));
  if (!f.driver.empty()) {
    out.push_back(persistence(f));
    out.push_back(mps(f));
  }
  out.push_back(clock(f));
  out.push_back(governor(f));
  return out;
}

std::string show_findings(const std::vector<Finding>& findings) {
  std::string out;
  for (const Finding& f : findings) {
    const std::string mark = f.verdict == Verdict::ok ? "ok    " : f.verdict == Verdict::warn ? "warn  " : "BAD   ";
    out += mark + f.check + ": " + f.text + "\n";
    if (!f.fix.empty()) out += "      fix: " + f.fix + "\n";
  }
  return out;
}

Json document_of(const std::vector<Finding>& findings) {
  Json list = Json::array();
  for (const Finding& f : findings) {
    list.push_back({{"check", f.check}, {"verdict", name(f.verdict)}, {"text", f.text}, {"fix", f.fix}});
  }
  return {{"ok", !any_bad(findings)}, {"findings", list}};
}

bool any_bad(const std::vector<Finding>& findings) {
  return std::any_of(findings.begin(), findings.end(), [](const Finding& f) { return f.verdict == Verdict::bad; });
}

}  // namespace kvqctl
