// posix_spawn, with the four descriptors moved out of each other's way first.
#include "daemon/device/worker_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "daemon/gpu/worker_protocol.h"

extern char** environ;

namespace kvq {
namespace {

constexpr int kFirstFree = gpu::kDaemonBellFd + 1;
constexpr int kPatienceMs = 2000;                        // of a destructor
constexpr idtype_t kByPidfd = static_cast<idtype_t>(3);  // P_PIDFD

struct SpawnSettings {
  SpawnSettings() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

// Signals as a program expects them, and none from the terminal: kvqd's end is the worker's.
void set_signals(posix_spawnattr_t& attributes) {
  sigset_t none, usual;
  ::sigemptyset(&none);
  ::sigemptyset(&usual);
  ::sigaddset(&usual, SIGPIPE);
  ::sigaddset(&usual, SIGXFSZ);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &usual);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
}

bool wait_for(int pidfd, int most_ms) {
  pollfd wanted{pidfd, POLLIN, 0};
  return ::poll(&wanted, 1, most_ms) == 1;
}

}  // namespace

Result<WorkerProcess> WorkerProcess::start(const std::vector<std::string>& command,
                                           const WorkerDescriptors& descriptors) {
  const int given[] = {descriptors.socket, descriptors.rings, descriptors.worker_bell, descriptors.daemon_bell};
  Descriptor moved[4];
  SpawnSettings settings;
  ::posix_spawn_file_actions_addopen(&settings.actions, 0, "/dev/null", O_RDONLY, 0);
  for (int i = 0; i < 4; ++i) {
    moved[i] = Descriptor(::fcntl(given[i], F_DUPFD_CLOEXEC, kFirstFree));
    if (moved[i].get() < 0) return Error{Errc::system, errno, "descriptors for the GPU worker"};
    ::posix_spawn_file_actions_adddup2(&settings.actions, moved[i].get(), gpu::kSocketFd + i);
  }
  ::posix_spawn_file_actions_addclosefrom_np(&settings.actions, kFirstFree);
  set_signals(settings.attributes);
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  WorkerProcess process;
  const int error =
      ::posix_spawn(&process.pid_, arguments[0], &settings.actions, &settings.attributes, arguments.data(), environ);
  if (error != 0) {
    process.pid_ = -1;
    return Error{Errc::system, error, "starting the GPU worker"};
  }
  process.pidfd_ = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, process.pid_, 0)));
  if (process.pidfd_.get() < 0) {
    const int native = errno;
    ::kill(process.pid_, SIGKILL);
    ::waitpid(process.pid_, nullptr, 0);
    process.pid_ = -1;
    return Error{Errc::system, native, "pidfd_open of the GPU worker"};
  }
  return process;
}

WorkerProcess& WorkerProcess::operator=(WorkerProcess&& other) noexcept {
  std::swap(pidfd_, other.pidfd_);
  std::swap(pid_, other.pid_);
  std::swap(how_, other.how_);
  return *this;
}

WorkerProcess::~WorkerProcess() {
  if (pidfd_.get() < 0) return;
  end_process(pidfd_.get(), kPatienceMs);
  std::string how;
  ended(how);
}

void WorkerProcess::kill() const {
  if (pidfd_.get() >= 0) ::syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0);
}

bool WorkerProcess::ended(std::string& how, int most_ms) {
  if (!wait_for(pidfd_.get(), most_ms)) return false;
  if (!how_.empty()) {
    how = how_;
    return true;
  }
  siginfo_t info{};
  how = "an unknown cause";
  if (::waitid(kByPidfd, static_cast<id_t>(pidfd_.get()), &info, WEXITED | WNOHANG) == 0 && info.si_pid != 0) {
    how = (info.si_code == CLD_EXITED ? "exit code " : "signal ") + std::to_string(info.si_status);
  }
  how_ = how;
  return true;
}

bool end_process(int pidfd, int most_ms) {
  const bool sent = ::syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, nullptr, 0) == 0;
  if (!sent && errno != ESRCH) return true;  // it names no process
  return wait_for(pidfd, most_ms);
}

}  // namespace kvq
