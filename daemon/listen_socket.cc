// Lock, then look at what is at the path, then bind: in this order nothing can race.
#include "daemon/listen_socket.h"

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <vector>

namespace kvq {
namespace {

constexpr int kBacklog = 128;
constexpr int kLockReadTries = 50;
constexpr int kLockReadWaitMs = 2;

[[noreturn]] void refuse(ExitCode code, const std::string& what, const std::string& fix, int error = 0) {
  throw StartupError(code, what + (error != 0 ? std::string(": ") + std::strerror(error) : "") + ": " + fix);
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    refuse(ExitCode::usage, "socket path " + path + " has " + std::to_string(path.size()) + " bytes",
           "a Unix socket's path has at most 107; choose a shorter one");
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

// The pid the owner of the lock wrote. It takes the lock first and writes then, so an empty or dead pid is read again
// for a moment. 0 when it cannot be told.
pid_t owner_of(int lock_fd) {
  for (int i = 0; i < kLockReadTries; ++i) {
    char text[16] = {};
    pid_t pid = 0;
    const auto bytes = pread(lock_fd, text, sizeof text - 1, 0);
    if (bytes > 0) std::from_chars(text, text + bytes, pid);
    if (pid > 0 && (kill(pid, 0) == 0 || errno == EPERM)) return pid;
    ::poll(nullptr, 0, kLockReadWaitMs);
  }
  return 0;
}

[[noreturn]] void refuse_running(const std::string& path, pid_t pid, const char* option) {
  refuse(ExitCode::already_running,
         "already running (pid " + (pid > 0 ? std::to_string(pid) : "unknown") + ") on " + path,
         std::string("stop it, or choose another path with ") + option);
}

// The process listening at `address`, 0 when its pid is not ours to see; nothing when nobody listens.
std::optional<pid_t> listener_at(const sockaddr_un& address) {
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (probe < 0) refuse(ExitCode::environment, "socket", "raise the descriptor limit", errno);
  const int status = connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  const bool listens = status == 0 || errno == EAGAIN;  // EAGAIN: its backlog is full, so somebody listens
  ucred peer{};
  socklen_t size = sizeof peer;
  if (status == 0) getsockopt(probe, SOL_SOCKET, SO_PEERCRED, &peer, &size);
  close(probe);
  return listens ? std::optional(peer.pid) : std::nullopt;
}

gid_t group_id(const std::string& setting, const std::string& name) {
  std::vector<char> buffer(1 << 14);
  group entry{};
  group* found = nullptr;
  const int error = getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found == nullptr)
    refuse(ExitCode::usage, setting + " = \"" + name + "\": no such group", "groupadd " + name, error);
  return entry.gr_gid;
}

}  // namespace

std::string directory_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

ListenSocket::ListenSocket(const ListenOptions& options)
    : path_(options.path), option_(options.option), fd_(options.handed) {
  try {
    (void)address_of(path_);
    take_lock();
    if (options.handed >= 0) {
      adopt(options.handed);
    } else {
      bind_fresh(options);
    }
  } catch (...) {
    release();
    throw;
  }
}

ListenSocket::~ListenSocket() { release(); }

void ListenSocket::take_lock() {
  const auto lock_path = path_ + ".lock";
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0 && errno == ENOENT) {
    const auto directory = directory_of(path_);
    refuse(ExitCode::environment, "directory " + directory + " does not exist",
           "create it (mkdir -p " + directory + "), or let systemd do so (RuntimeDirectory=kvq)");
  }
  if (fd < 0) refuse(ExitCode::environment, "lock file " + lock_path, "make it writable for kvqd's user", errno);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    const pid_t owner = error == EWOULDBLOCK ? owner_of(fd) : 0;
    close(fd);
    if (error == EWOULDBLOCK) refuse_running(path_, owner, option_);
    refuse(ExitCode::environment, "lock file " + lock_path, "choose a path on a file system with locks", error);
  }
  lock_fd_ = fd;  // from here it is ours to write
  const auto pid = std::to_string(getpid()) + "\n";
  if (ftruncate(lock_fd_, 0) != 0 || pwrite(lock_fd_, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    refuse(ExitCode::environment, "lock file " + lock_path, "free space on its file system", errno);
  }
}

void ListenSocket::adopt(int fd) {
  adopted_ = true;
  if (sd_is_socket_unix(fd, SOCK_STREAM, /*listening=*/1, nullptr, 0) <= 0) {
    refuse(ExitCode::usage, "the socket that systemd handed over is not a listening Unix stream socket",
           "kvqd.socket must say ListenStream=/a/path");
  }
  if (sd_is_socket_unix(fd, SOCK_STREAM, 1, path_.c_str(), 0) <= 0) {
    refuse(ExitCode::usage, "the socket that systemd handed over is not at " + path_,
           "give ListenStream= in kvqd.socket and `socket` in the configuration the same path");
  }
  if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) {
    refuse(ExitCode::environment, "the handed-over socket", "restart kvqd.socket", errno);
  }
}

void ListenSocket::bind_fresh(const ListenOptions& options) {
  const auto address = address_of(path_);
  struct stat status {};
  if (lstat(path_.c_str(), &status) == 0) {
    if (!S_ISSOCK(status.st_mode)) {
      refuse(ExitCode::usage, path_ + " exists and is not a socket",
             std::string("move it away, or choose another path with ") + option_);
    }
    // We hold the lock, so this is a stale socket, unless it belongs to somebody who does not lock, such as systemd.
    if (const auto pid = listener_at(address)) refuse_running(path_, *pid, option_);
    unlink(path_.c_str());
  }
  fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0) refuse(ExitCode::environment, "socket", "raise the descriptor limit", errno);
  // Linux takes the mode of the new file from the socket, so the path never exists with a wider one.
  fchmod(fd_, 0600);
  if (bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    refuse(ExitCode::environment, "bind " + path_, "make its directory writable for kvqd's user", errno);
  }
  bound_ = true;
  if (!options.group.empty() &&
      chown(path_.c_str(), static_cast<uid_t>(-1), group_id(options.group_setting, options.group)) != 0) {
    refuse(ExitCode::environment, "cannot give " + path_ + " to group " + options.group,
           "make kvqd's user a member of it (SupplementaryGroups= in the unit)", errno);
  }
  if (chmod(path_.c_str(), options.mode) != 0 || listen(fd_, kBacklog) != 0) {
    refuse(ExitCode::environment, "listen on " + path_, "choose a path on a local file system", errno);
  }
}

void ListenSocket::release() noexcept {
  if (bound_) unlink(path_.c_str());
  if (fd_ >= 0) close(fd_);
  if (lock_fd_ >= 0) {
    (void)!ftruncate(lock_fd_, 0);  // a pid that is gone would only mislead
    close(lock_fd_);
  }
  bound_ = false;
  fd_ = lock_fd_ = -1;
}

}  // namespace kvq
