// Real programs as children: start, wait for what they say, end them.
//
// Invariant: no child outlives its Process; nothing sleeps: readiness is the daemon's own READY=1, ends are waited for.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace kvq::testing {

constexpr int kPatienceMs = 30'000;

class Directory {
 public:
  Directory() {
    char name[] = "/tmp/kvq-e2e-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~Directory() { std::filesystem::remove_all(path); }
  std::string file(const std::string& name) const { return path + "/" + name; }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(file(name)) << text;
    return file(name);
  }
  std::string path;
};

inline std::string read_file(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

struct Ended {
  int exit_code = -1;  // 128 + signal when killed
  std::string out, err;
};

class Process {
 public:
  // `prepare` runs in the child before exec. `environment`: more variables, "NAME=value".
  Process(
      const Directory& directory, std::vector<std::string> argv, std::vector<std::string> environment = {},
      const std::function<void()>& prepare = [] {})
      : out_(directory.file("out" + std::to_string(++count()))), err_(directory.file("err" + std::to_string(count()))) {
    pid = ::fork();
    if (pid != 0) return;
    ::dup2(::open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
    ::dup2(::open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
    std::vector<char*> arguments;
    for (std::string& argument : argv) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    for (std::string& variable : environment) ::putenv(variable.data());
    prepare();
    ::execv(arguments[0], arguments.data());
    std::fprintf(stderr, "cannot run %s: %s\n", arguments[0], std::strerror(errno));
    ::_exit(127);
  }
  ~Process() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  Ended wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    pid = -1;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out_), read_file(err_)};
  }
  Ended end(int signal) {
    EXPECT_EQ(::kill(pid, signal), 0);
    return wait();
  }
  std::string err() const { return read_file(err_); }
  std::string out() const { return read_file(out_); }

  pid_t pid = -1;

 private:
  static int& count() {
    static int n = 0;
    return n;
  }
  std::string out_, err_;
};

inline Ended run(
    const Directory& directory, std::vector<std::string> argv, std::vector<std::string> environment = {},
    const std::function<void()>& prepare = [] {}) {
  return Process(directory, std::move(argv), std::move(environment), prepare).wait();
}

// The service manager's side of the notify protocol.
class Notify {
 public:
  explicit Notify(const Directory& directory) : path_(directory.file("notify")) {
    ::unlink(path_.c_str());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
    fd_ = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Notify() { ::close(fd_); }
  std::string variable() const { return "NOTIFY_SOCKET=" + path_; }

  // Waits for a message that holds `text`; false when none comes for `patience_ms`.
  bool hear(const std::string& text, int patience_ms = kPatienceMs) {
    for (;;) {
      pollfd entry{fd_, POLLIN, 0};
      if (::poll(&entry, 1, patience_ms) != 1) return false;
      char message[512] = {};
      const ssize_t got = ::recv(fd_, message, sizeof(message) - 1, 0);
      if (got > 0 && std::string(message).find(text) != std::string::npos) return true;
    }
  }

 private:
  std::string path_;
  int fd_ = -1;
};

// A small daemon, ready when constructed.
class Daemon {
 public:
  explicit Daemon(const Directory& directory, std::vector<std::string> options = {},
                  std::vector<std::string> environment = {})
      : socket(directory.file("kvqd.sock")), notify(directory) {
    std::vector<std::string> argv = {KVQD_PATH,      "--socket", socket,        "--arena-bytes", "16MiB",
                                     "--slab-bytes", "1MiB",     "--max-pages", "4096"};
    argv.insert(argv.end(), options.begin(), options.end());
    environment.push_back(notify.variable());
    process = std::make_unique<Process>(directory, argv, environment);
    EXPECT_TRUE(notify.hear("READY=1")) << process->err();
  }
  std::string socket;
  Notify notify;
  std::unique_ptr<Process> process;
};

inline std::size_t lines(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace kvq::testing
