// Start-up checks; each message is one line: what is there, what is needed, how to get it.
#include "daemon/limits.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <sstream>

namespace kvq {
namespace {

// What is kept for the next daemon has a duplicate while the service manager's queue is full. A slab is a memfd, one
// reopened read-only for those who may not write it, and that duplicate. A GPU's cannot be reopened; its spare slabs,
// one descriptor each, are those of the arena that have no place yet.
constexpr std::uint64_t kKeptPerSlab = 1;
constexpr std::uint64_t kDescriptorsPerSlab = 2 + kKeptPerSlab;
// Kept: segment memfd, pidfd, two eventfds. Besides the connection and its own pidfd; all of these again while a
// predecessor is being buried; the duplicates of one of the two.
constexpr std::uint64_t kKeptPerSession = 4;
constexpr std::uint64_t kDescriptorsPerSession = 2 * (kKeptPerSession + 2) + kKeptPerSession;
// Kept: page records, directory, prefix table. The last two also read-only, and the duplicates.
constexpr std::uint64_t kKeptPerTenant = 3;
constexpr std::uint64_t kDescriptorsPerTenant = kKeptPerTenant + 2 + kKeptPerTenant;
// Kept, on a GPU: the directory's mirror, and its duplicate.
constexpr std::uint64_t kKeptPerMirror = 1;
constexpr std::uint64_t kDescriptorsPerMirror = 2 * kKeptPerMirror;
// Kept: its pidfd, and the duplicate. Socket, rings, two bells, epoll set, timer. Another five while one is started:
// its end of the socket, and what it gets moved out of each other's way.
constexpr std::uint64_t kKeptPerWorker = 1;
constexpr std::uint64_t kDescriptorsPerWorker = 2 * kKeptPerWorker + 6 + 5;
// Kept: root, tenants, sessions, slabs, models, sequences, chunks, journal.
constexpr std::uint64_t kKeptBase = 8;
// Those and their duplicates for each device; loop, log, listener, lock file, notify socket, libraries.
constexpr std::uint64_t kDescriptorsBase = 64;
// LISTEN_FDNAMES names all that is handed to the next daemon, and the kernel takes at most 128 KiB in one variable: so
// many names of 24 bytes (kvq-doorbell-4294967295) fit, and of a GPU's (kvq-1a2b3c4d-slab-1000) few enough are longer.
// The same number as FileDescriptorStoreMax= in kvqd.service.
constexpr std::uint64_t kMostKept = 5000;
// Of an arena while it serves. Addresses are reserved for all of it, and records of 24 bytes.
constexpr std::uint64_t kMostGrowth = 64, kMostSlabs = 65536;

std::string number(std::uint64_t value) { return std::to_string(value); }

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

std::optional<std::uint64_t> leading_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  return parsed.ec == std::errc() ? std::optional(value) : std::nullopt;
}

Limit read_limit(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) return {UINT64_MAX, UINT64_MAX};
  return {limit.rlim_cur, limit.rlim_max};  // RLIM_INFINITY is UINT64_MAX
}

Processor read_processor() {
  Processor processor;
  utsname name{};
  uname(&name);
  processor.architecture = name.machine;
  processor.little_endian = std::endian::native == std::endian::little;
#if defined(__x86_64__)
  processor.vectors = __builtin_cpu_supports("ssse3");
  processor.avx2 = __builtin_cpu_supports("avx2");
  processor.fma = __builtin_cpu_supports("fma");
  processor.f16c = __builtin_cpu_supports("f16c");
#endif
  return processor;
}

void refuse(const Problem& problem) {
  if (problem) throw StartupError(ExitCode::environment, *problem);
}

// Calls `bound(bytes, name)` for each bound of this machine's memory.
template <typename Bound>
void each_memory_bound(Bound bound) {
  bound(parse_memory_total(read_file("/proc/meminfo")), std::string("the machine's memory"));
  for (const auto& file : group_limit_files(read_file("/proc/self/cgroup"))) {
    if (const auto limit = parse_group_limit(read_file(file))) {
      bound(*limit, "the control group's limit (" + file + ")");
    }
  }
}

}  // namespace

std::uint64_t descriptors_needed(const Needs& needs) {
  std::uint64_t of_device = needs.slabs * kDescriptorsPerSlab + needs.tenants * kDescriptorsPerTenant + 2 * kKeptBase;
  if (needs.gpus) of_device += needs.tenants * kDescriptorsPerMirror + kDescriptorsPerWorker;
  return needs.devices * of_device + needs.sessions * kDescriptorsPerSession + kDescriptorsBase;
}

std::uint64_t kept_needed(const Needs& needs) {
  std::uint64_t of_device = needs.slabs * kKeptPerSlab + needs.tenants * kKeptPerTenant + kKeptBase;
  if (needs.gpus) of_device += needs.tenants * kKeptPerMirror + kKeptPerWorker;
  return needs.devices * of_device + needs.sessions * kKeptPerSession;
}

Room read_room(const Needs& needs) {
  Room room;
  each_memory_bound([&](std::uint64_t bytes, const std::string&) {
    if (bytes != 0) room.memory_bytes = room.memory_bytes == 0 ? bytes : std::min(room.memory_bytes, bytes);
  });
  room.descriptors = read_limit(RLIMIT_NOFILE).hard;
  room.fixed =
      read_limit(RLIMIT_AS).soft != UINT64_MAX || (needs.lock_memory && read_limit(RLIMIT_MEMLOCK).hard != UINT64_MAX);
  return room;
}

std::uint64_t most_slabs(const Needs& needs, const Room& room) {
  if (room.fixed || needs.slabs == 0) return needs.slabs;
  std::uint64_t most = std::min(needs.slabs * kMostGrowth, kMostSlabs);
  if (!needs.gpus && room.memory_bytes != 0) {
    most = std::min(most, room.memory_bytes / std::max<std::uint64_t>(needs.arena_bytes / needs.slabs, 1));
  }
  const auto within = [&](std::uint64_t limit, std::uint64_t needed, std::uint64_t each) {
    const std::uint64_t rest = limit - std::min(limit, needed);
    most = std::min(most, needs.slabs + rest / (needs.devices * each));
  };
  within(room.descriptors, descriptors_needed(needs), kDescriptorsPerSlab);
  if (needs.kept) within(kMostKept, kept_needed(needs), kKeptPerSlab);
  return std::max(most, needs.slabs);
}

Problem check_kept(std::uint64_t kept) {
  if (kept <= kMostKept) return std::nullopt;
  return "this configuration may keep " + number(kept) + " descriptors for the next kvqd, " + number(kMostKept) +
         " can be handed to it, so a restart may lose the cache: raise slab_bytes or lower max_sessions";
}

Problem check_descriptors(std::uint64_t needed, Limit descriptors) {
  if (needed <= descriptors.hard) return std::nullopt;
  return "the descriptor limit is " + number(descriptors.hard) + ", this configuration may need " + number(needed) +
         ": set LimitNOFILE=" + number(needed) +
         " in the unit (ulimit -Hn), or raise slab_bytes, or lower max_sessions";
}

Problem check_memory(std::uint64_t arena_bytes, std::uint64_t limit_bytes, std::string_view limit_name) {
  if (limit_bytes == 0 || arena_bytes <= limit_bytes) return std::nullopt;
  return "arena_bytes is " + number(arena_bytes) + ", " + std::string(limit_name) + " is " + number(limit_bytes) +
         " bytes: lower arena_bytes or raise the limit";
}

Problem check_lockable(std::uint64_t arena_bytes, Limit locked_bytes) {
  if (arena_bytes <= locked_bytes.hard) return std::nullopt;
  return "lock_memory is set, but RLIMIT_MEMLOCK is " + number(locked_bytes.hard) + " bytes and the arena " +
         number(arena_bytes) + ": set LimitMEMLOCK=infinity in the unit, or lock_memory = false";
}

Problem check_processor(const Processor& processor, Problem& slow) {
  const auto& name = processor.architecture;
  if (name != "x86_64" && name != "aarch64") {
    return "the processor is " + name + ", kvqd runs on x86_64 and aarch64: use such a machine";
  }
  if (!processor.little_endian) {
    return "the processor is big-endian, shared memory layouts are little-endian: use a little-endian system";
  }
  if (!processor.vectors) {
    return "the processor lacks SSSE3, for which no kernels exist: use a newer one; in a virtual machine pass the "
           "host's "
           "processor through (-cpu host)";
  }
  if (name == "x86_64" && !(processor.avx2 && processor.f16c && processor.fma)) {
    slow =
        "the processor lacks AVX2, F16C or FMA: kernels run in a slower version; in a virtual machine pass the "
        "host's processor through (-cpu host)";
  }
  return std::nullopt;
}

std::uint64_t parse_memory_total(std::string_view meminfo) {
  constexpr std::string_view kKey = "MemTotal:";
  const auto at = meminfo.find(kKey);
  if (at == std::string_view::npos) return 0;
  auto rest = meminfo.substr(at + kKey.size());
  rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
  return leading_number(rest).value_or(0) * 1024;  // the file counts in KiB, which it writes kB
}

std::optional<std::uint64_t> parse_group_limit(std::string_view text) { return leading_number(text); }

std::vector<std::string> group_limit_files(std::string_view self_cgroup) {
  std::vector<std::string> files;
  std::istringstream lines{std::string(self_cgroup)};
  for (std::string line; std::getline(lines, line);) {
    // "0::/path" is the unified hierarchy, "4:memory:/path" the older one.
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    auto path = line.substr(second + 1);
    std::string mount = "/sys/fs/cgroup", leaf = "/memory.max";
    if (controllers.find(",memory,") != std::string::npos) {
      mount += "/memory";
      leaf = "/memory.limit_in_bytes";
    } else if (controllers != ",,") {
      continue;
    }
    // A limit on any group above binds as well.
    for (; path.size() > 1; path.erase(path.rfind('/'))) files.push_back(mount + path + leaf);
    files.push_back(mount + leaf);
  }
  return files;
}

Problem check_directory(const std::string& directory) {
  struct stat status {};
  if (stat(directory.c_str(), &status) != 0) {
    return "directory " + directory + ": " + std::strerror(errno) + ": create it (mkdir -p " + directory +
           "), or let systemd do so (RuntimeDirectory=kvq)";
  }
  if (!S_ISDIR(status.st_mode)) return directory + " is not a directory: remove it, or choose another socket path";
  if (access(directory.c_str(), W_OK | X_OK) == 0) return std::nullopt;
  return "directory " + directory + " is not writable for uid " + number(geteuid()) +
         ": chown it to that user, or set " + "User= of the unit to its owner";
}

Problem check_memfd() {
  const int fd = memfd_create("kvq-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const bool works =
      fd >= 0 && ftruncate(fd, 4096) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (works) return std::nullopt;
  return std::string("a sealed memfd cannot be made: ") + std::strerror(error) +
         ": kvqd needs Linux 5.3 or later, and a container profile that allows memfd_create";
}

std::vector<std::string> check_environment(const Needs& needs) {
  std::vector<std::string> warnings;
  Problem slow;
  refuse(check_processor(read_processor(), slow));
  if (slow) warnings.push_back(*slow);
  if (needs.kept) {
    if (const auto many = check_kept(kept_needed(needs))) warnings.push_back(*many);
  }
  refuse(check_directory(needs.runtime_directory));
  refuse(check_memfd());
  each_memory_bound(
      [&](std::uint64_t bytes, const std::string& name) { refuse(check_memory(needs.arena_bytes, bytes, name)); });

  const auto needed = descriptors_needed(needs);
  const auto descriptors = read_limit(RLIMIT_NOFILE);
  refuse(check_descriptors(needed, descriptors));
  Needs grown = needs;
  grown.slabs = most_slabs(needs, read_room(needs));
  const auto wanted = std::min(descriptors_needed(grown), descriptors.hard);
  if (descriptors.soft < wanted) {
    const rlimit raised{wanted, descriptors.hard};
    if (setrlimit(RLIMIT_NOFILE, &raised) != 0) refuse(check_descriptors(needed, {descriptors.soft, descriptors.soft}));
  }
  if (needs.lock_memory) {
    const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
    if (setrlimit(RLIMIT_MEMLOCK, &unlimited) != 0) {  // only a privileged kvqd may raise it
      refuse(check_lockable(needs.arena_bytes, read_limit(RLIMIT_MEMLOCK)));
    }
    if (mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) != 0) {
      refuse(std::string("lock_memory is set, but mlockall failed: ") + std::strerror(errno) +
             ": give the unit CAP_IPC_LOCK or LimitMEMLOCK=infinity, or set lock_memory = false");
    }
  }
  return warnings;
}

}  // namespace kvq
