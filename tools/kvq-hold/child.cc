// fork, arrange, exec. This process has one thread, so the child may allocate before exec.
#include "tools/kvq-hold/child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "tools/kvq-hold/failure.h"

namespace kvq_hold {
namespace {

constexpr int kFirstPassed = 3;  // by convention

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "kvq-hold: cannot run %s: %s\n", what, std::strerror(errno));
  std::_Exit(kCannotRun);
}

// First out of the way of all targets, then each to its own: any order of numbers works. dup2 clears close-on-exec,
// which everything else has.
void arrange(const std::vector<Passed>& passed) {
  const int end = kFirstPassed + static_cast<int>(passed.size());
  std::vector<int> high;
  for (const Passed& one : passed) {
    high.push_back(::fcntl(one.fd, F_DUPFD_CLOEXEC, end));
    if (high.back() < 0) fail("it with its descriptors");
  }
  for (std::size_t i = 0; i < high.size(); ++i) {
    if (::dup2(high[i], kFirstPassed + static_cast<int>(i)) < 0) fail("it with its descriptors");
  }
}

void set_environment(const std::vector<Passed>& passed, const std::string& notify_address) {
  ::setenv("NOTIFY_SOCKET", notify_address.c_str(), 1);
  for (const char* name : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"})
    ::unsetenv(name);
  if (passed.empty()) return;
  std::string names;
  for (const Passed& one : passed) names += (names.empty() ? "" : ":") + one.name;
  ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
  ::setenv("LISTEN_FDS", std::to_string(passed.size()).c_str(), 1);
  ::setenv("LISTEN_FDNAMES", names.c_str(), 1);
}

}  // namespace

void keep_from_child() {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    if (fd > STDERR_FILENO) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
}

pid_t start_child(const std::vector<std::string>& argv, const std::vector<Passed>& passed,
                  const std::string& notify_address) {
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0)
    throw Failure(kEnvironment, std::string("fork: ") + std::strerror(errno) + ": raise the process limit");
  if (child > 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) std::_Exit(kCannotRun);  // it died before it could be tied to
  arrange(passed);
  set_environment(passed, notify_address);
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  fail(arguments[0]);
}

End end_of(int wait_status) {
  if (WIFSIGNALED(wait_status)) return {.signal = WTERMSIG(wait_status)};
  return {.exit_code = WEXITSTATUS(wait_status)};
}

std::string End::text() const {
  if (signal == 0) return "exit code " + std::to_string(exit_code);
  return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
}

}  // namespace kvq_hold
