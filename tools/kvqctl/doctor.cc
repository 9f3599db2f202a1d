// Reads /proc, /sys, /dev, the user database and kvqd.
#include "tools/kvqctl/doctor.h"

#include <dirent.h>
#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iostream>
#include <sstream>

#include "tools/kvqctl/admin_client.h"
#include "tools/kvqctl/doctor_findings.h"

namespace kvqctl {
namespace {

constexpr std::uint64_t kAnswerMs = 3000;

std::string line_of(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

// The number behind `name` in a file of lines; in `limits` the first of them is the soft limit.
std::optional<std::uint64_t> number_behind(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    std::istringstream rest(line.substr(name.size()));
    std::string word;
    rest >> word;
    if (word == "unlimited") return UINT64_MAX;
    if (!word.empty() && std::isdigit(static_cast<unsigned char>(word[0]))) return std::stoull(word);
  }
  return std::nullopt;
}

bool may_use(const std::string& path) { return ::access(path.c_str(), R_OK | W_OK) == 0; }

void see_socket(Facts& f) {
  const passwd* user = ::getpwuid(::geteuid());
  f.root = ::geteuid() == 0;
  f.user = user != nullptr ? user->pw_name : "uid " + std::to_string(::geteuid());
  const auto slash = f.socket.rfind('/');
  struct stat at {};
  f.socket_folder =
      slash == std::string::npos || ::stat(f.socket.substr(0, std::max<std::size_t>(slash, 1)).c_str(), &at) == 0;
  if (::stat(f.socket.c_str(), &at) != 0) return;
  f.socket_exists = true;
  f.socket_is_one = S_ISSOCK(at.st_mode);
  f.socket_writable = may_use(f.socket);
  const group* of = ::getgrgid(at.st_gid);
  f.socket_group = of != nullptr ? of->gr_name : std::to_string(at.st_gid);
  for (char** member = of != nullptr ? of->gr_mem : nullptr; member != nullptr && *member != nullptr; ++member) {
    f.listed_in_socket_group = f.listed_in_socket_group || f.user == *member;
  }
  std::vector<gid_t> mine(static_cast<std::size_t>(std::max(0, ::getgroups(0, nullptr))));
  mine.resize(static_cast<std::size_t>(std::max(0, ::getgroups(static_cast<int>(mine.size()), mine.data()))));
  f.in_socket_group = ::getegid() == at.st_gid || std::find(mine.begin(), mine.end(), at.st_gid) != mine.end();
}

void see_daemon(Facts& f) {
  if (!f.socket_writable || !f.socket_is_one) return;  // told already
  try {
    f.status = Json::parse(AdminClient(f.socket, kAnswerMs).status());
    const std::string limits = "/proc/" + f.status->at("pid").dump() + "/limits";
    f.open_files = number_behind(limits, "Max open files");
    f.locked_bytes = number_behind(limits, "Max locked memory");
  } catch (const Failure& failure) {
    f.no_daemon = failure.what();
  }
}

void see_gpus(Facts& f) {
  f.driver = line_of("/sys/module/nvidia/version");
  if (DIR* devices = ::opendir("/dev")) {
    while (const dirent* entry = ::readdir(devices)) {
      const std::string name = entry->d_name;
      const bool numbered =
          name.size() > 6 && std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return std::isdigit(c); });
      if (name.rfind("nvidia", 0) == 0 && numbered) f.nodes.push_back({"/dev/" + name, may_use("/dev/" + name)});
    }
    ::closedir(devices);
  }
  std::sort(f.nodes.begin(), f.nodes.end(), [](const Node& a, const Node& b) { return a.path < b.path; });
  f.control_node = may_use("/dev/nvidiactl");
  f.uvm_node = may_use("/dev/nvidia-uvm");
  f.persistence = ::access("/run/nvidia-persistenced/socket", F_OK) == 0;
  const char* pipes = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  f.mps = ::access((std::string(pipes != nullptr ? pipes : "/tmp/nvidia-mps") + "/control").c_str(), F_OK) == 0;
}

Facts facts_of(const std::string& socket) {
  Facts f;
  f.socket = socket;
  see_socket(f);
  see_daemon(f);
  see_gpus(f);
  const auto kib = [](const char* name) { return number_behind("/proc/meminfo", name).value_or(0) * 1024; };
  f.memory_bytes = kib("MemTotal:");
  f.available_bytes = kib("MemAvailable:");
  f.swap_used_bytes = kib("SwapTotal:") - kib("SwapFree:");
  f.clock_source = line_of("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  f.governor = line_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
  return f;
}

}  // namespace

void doctor(const Options& o) {
  const std::vector<Finding> findings = findings_of(facts_of(socket_of(o)));
  std::cout << (o.json ? document_of(findings).dump(2) + "\n" : show_findings(findings)) << std::flush;
  if (!any_bad(findings)) return;
  const auto count =
      std::count_if(findings.begin(), findings.end(), [](const Finding& f) { return f.verdict == Verdict::bad; });
  throw Failure(kUnwell, std::to_string(count) + " of " + std::to_string(findings.size()) +
                             " checks are bad; each names its fix");
}

}  // namespace kvqctl
