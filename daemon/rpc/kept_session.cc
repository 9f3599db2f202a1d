// Checks descriptors by what /proc and the kernel's pidfs say of them.
#include "daemon/rpc/kept_session.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <optional>

namespace kvq {
namespace {

constexpr long kPidfsMagic = 0x50494446;  // Linux 6.9
constexpr const char* kKinds[] = {"pid", "doorbell", "notice"};

std::string name_of(const char* kind, SessionId id) {
  return std::string("kvq-") + kind + "-" + std::to_string(raw(id));
}

Descriptor take(Kept& kept, const std::string& name) {
  const auto found = kept.find(name);
  if (found == kept.end()) return {};
  Descriptor out = std::move(found->second);
  kept.erase(found);
  return out;
}

bool is_eventfd(int fd) {
  char target[64] = {};
  const auto bytes = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof(target) - 1);
  return bytes > 0 && std::strcmp(target, "anon_inode:[eventfd]") == 0;
}

// The process that a pidfd names; -1: it has ended. Empty: it is no pidfd.
std::optional<long> process_of(int fd) {
  std::FILE* info = std::fopen(("/proc/self/fdinfo/" + std::to_string(fd)).c_str(), "re");
  if (info == nullptr) return std::nullopt;
  std::optional<long> out;
  char line[128];
  while (std::fgets(line, sizeof(line), info) != nullptr) {
    long pid = 0;
    if (std::sscanf(line, "Pid: %ld", &pid) == 1) out = pid;
  }
  std::fclose(info);
  return out;
}

// The inode of a pidfd where each process has one of its own.
std::optional<ino_t> process_inode(int pidfd) {
  struct statfs system {};
  struct stat file {};
  if (::fstatfs(pidfd, &system) != 0 || static_cast<long>(system.f_type) != kPidfsMagic) return std::nullopt;
  if (::fstat(pidfd, &file) != 0) return std::nullopt;
  return file.st_ino;
}

void check_pidfd(KeptSession& out, std::uint32_t pid) {
  const auto process = process_of(out.pidfd.get());
  if (process && (*process == static_cast<long>(pid) || *process == -1)) return;
  out.problem = out.pidfd.get() < 0 ? "its pidfd is missing"
                : !process          ? "its pidfd is none"
                                    : "its pidfd names process " + std::to_string(*process);
  out.pidfd = Descriptor();
}

void check_eventfd(KeptSession& out, Descriptor& fd, const char* kind) {
  if (is_eventfd(fd.get())) return;
  if (out.problem.empty()) out.problem = std::string("its ") + kind + (fd.get() < 0 ? " is missing" : " is no eventfd");
  fd = Descriptor();
}

}  // namespace

KeptSession take_kept(Kept& kept, const AdoptedSession& record) {
  KeptSession out;
  out.pidfd = take(kept, name_of("pid", record.id));
  out.doorbell = take(kept, name_of("doorbell", record.id));
  out.notice = take(kept, name_of("notice", record.id));
  check_pidfd(out, record.pid);
  check_eventfd(out, out.doorbell, "doorbell");
  check_eventfd(out, out.notice, "notice");
  return out;
}

void keep_session(Keeper& keeper, SessionId id, pid_t pid, int pidfd, int doorbell, int notice) {
  // A holder keeps one open file once, under one name, and sessions of one process share its connection's pidfd. The
  // number cannot name another process as long as the first one lives.
  const Descriptor own(pid > 0 ? static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)) : -1);
  keeper.keep(name_of("pid", id), own.get() >= 0 && !has_ended(pidfd) ? own.get() : pidfd);
  keeper.keep(name_of("doorbell", id), doorbell);
  keeper.keep(name_of("notice", id), notice);
}

void forget_session(Keeper& keeper, SessionId id) {
  for (const char* kind : kKinds) keeper.forget(name_of(kind, id));
}

void forget_strangers(Kept& kept, Keeper* keeper) {
  for (const char* kind : kKinds) {
    const std::string prefix = std::string("kvq-") + kind + "-";
    for (auto it = kept.lower_bound(prefix); it != kept.end() && it->first.rfind(prefix, 0) == 0;) {
      if (keeper != nullptr) keeper->forget(it->first);
      it = kept.erase(it);
    }
  }
}

bool has_ended(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) != 0;
}

bool same_living_process(int kept_pidfd, pid_t kept_pid, int peer_pidfd, pid_t peer_pid) {
  if (kept_pid != peer_pid || has_ended(kept_pidfd)) return false;
  const auto kept_inode = process_inode(kept_pidfd), peer_inode = process_inode(peer_pidfd);
  if (kept_inode && peer_inode) return *kept_inode == *peer_inode;
  return kept_pid > 0;  // 0: a process of another namespace, which the number does not tell apart
}

}  // namespace kvq
