// Invariant: the child gets no descriptor of the test but its log file.
#include "tests/support/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "tests/support/programs.h"

extern char** environ;

namespace kvq::test {
namespace {

constexpr int kReadyMs = 60'000;  // sanitizers on a busy machine

int bind_notify(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    throw std::runtime_error("bind " + path + ": " + std::strerror(errno));
  }
  return fd;
}

pid_t spawn(const std::vector<std::string>& arguments, const std::string& notify, const std::string& log) {
  std::vector<char*> argv;
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  const std::string variable = "NOTIFY_SOCKET=" + notify;
  std::vector<char*> env;
  for (char** e = environ; *e != nullptr; ++e) env.push_back(*e);
  env.push_back(const_cast<char*>(variable.c_str()));
  env.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), env.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error(arguments[0] + ": " + std::strerror(error));
  return pid;
}

// READY=1 within the time, or the process ended.
bool wait_ready(int notify_fd, pid_t pid) {
  for (int waited = 0; waited < kReadyMs; waited += 50) {
    pollfd wanted{notify_fd, POLLIN, 0};
    if (::poll(&wanted, 1, 50) > 0) {
      char text[512] = "";
      if (::recv(notify_fd, text, sizeof(text) - 1, 0) > 0 && std::strstr(text, "READY=1") != nullptr) return true;
    }
    siginfo_t ended{};
    if (::waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == pid)
      return false;
  }
  return false;
}

}  // namespace

DaemonProcess::DaemonProcess(const std::string& settings) {
  char pattern[] = "/tmp/kvq-test-XXXXXX";
  if (::mkdtemp(pattern) == nullptr) throw std::runtime_error("mkdtemp");
  directory_ = pattern;
  ::chmod(pattern, 0755);  // other users of a test must get through
  socket_ = directory_ + "/kvqd.sock";
  arguments_ = kvqd_arguments(directory_, "socket = \"" + socket_ + "\"\n" + settings);
  arguments_.insert(arguments_.begin(), program_path(KVQD_PATH));
  start();
}

void DaemonProcess::start() {
  ::unlink((directory_ + "/notify").c_str());
  const int notify = bind_notify(directory_ + "/notify");
  pid_ = spawn(arguments_, directory_ + "/notify", directory_ + "/log");
  const bool ready = wait_ready(notify, pid_);
  ::close(notify);
  if (ready) return;
  const std::string text = log();
  stop(SIGKILL);
  std::filesystem::remove_all(directory_);
  throw std::runtime_error("kvqd did not start: " + text);
}

DaemonProcess::~DaemonProcess() {
  if (pid_ > 0) stop(SIGTERM);
  if (std::getenv("KVQ_TEST_KEEP") == nullptr) std::filesystem::remove_all(directory_);
}

int DaemonProcess::stop(int signal) {
  ::kill(pid_, signal);
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return status;
}

std::string DaemonProcess::log() const {
  std::ostringstream text;
  text << std::ifstream(directory_ + "/log").rdbuf();
  return text.str();
}

std::vector<std::string> kvqd_arguments(const std::string& directory, const std::string& settings) {
  std::vector<std::string> arguments = {"--config", directory + "/kvqd.toml"};
  std::ofstream file(arguments.back());
  std::istringstream lines(settings);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("--", 0) == 0) {
      arguments.push_back(line);
    } else {
      file << line << "\n";
    }
  }
  return arguments;
}

pid_t worker_of(pid_t daemon) {
  if (daemon <= 0) return 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "stat");
    std::string pid, name, state;
    pid_t parent = 0;
    if (file >> pid >> name >> state >> parent && parent == daemon && state != "Z") {
      return static_cast<pid_t>(std::stol(pid));
    }
  }
  return 0;
}

std::string calm_settings() {
  return "arena_bytes = \"4MiB\"\nslab_bytes = \"256KiB\"\nmax_pages = 1024\n"
         "quantize_at = 0.97\nevict_at = 0.98\nrefuse_at = 0.99\nrelief = 0.01\nlog_level = \"debug\"\n";
}

}  // namespace kvq::test
