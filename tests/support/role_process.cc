// Invariant: one line is one message, in both directions, over the child's stdin and stdout.
#include "tests/support/role_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <map>
#include <stdexcept>

extern char** environ;

namespace kvq::test {
namespace {

constexpr int kSilenceMs = 60'000;

std::map<std::string, std::function<int(const Arguments&)>>& roles() {
  static std::map<std::string, std::function<int(const Arguments&)>> all;
  return all;
}

}  // namespace

Role::Role(const char* name, std::function<int(const Arguments&)> body) { roles()[name] = std::move(body); }

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

std::string hear() {
  std::string line;
  std::getline(std::cin, line);
  return line;
}

RoleProcess::RoleProcess(const std::string& role, const Arguments& arguments) {
  int down[2], up[2];
  if (::pipe2(down, O_CLOEXEC) != 0 || ::pipe2(up, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  std::vector<std::string> words = {"/proc/self/exe", "--role=" + role};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, down[0], 0);
  posix_spawn_file_actions_adddup2(&actions, up[1], 1);
  const int error = ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(down[0]);
  ::close(up[1]);
  to_ = down[1];
  from_ = up[0];
  if (error != 0) throw std::runtime_error("posix_spawn");
}

RoleProcess::~RoleProcess() {
  if (pid_ > 0) kill();
  ::close(to_);
  ::close(from_);
}

void RoleProcess::say(const std::string& line) {
  const std::string text = line + "\n";
  if (::write(to_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    throw std::runtime_error("the role is gone");
}

std::string RoleProcess::hear() {
  for (;;) {
    if (const auto end = buffer_.find('\n'); end != std::string::npos) {
      const std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    pollfd wanted{from_, POLLIN, 0};
    char text[512];
    if (::poll(&wanted, 1, kSilenceMs) <= 0) throw std::runtime_error("the role says nothing");
    const ssize_t got = ::read(from_, text, sizeof(text));
    if (got <= 0) throw std::runtime_error("the role ended");
    buffer_.append(text, static_cast<std::size_t>(got));
  }
}

int RoleProcess::wait() {
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int RoleProcess::kill() {
  ::kill(pid_, SIGKILL);
  return wait();
}

int main_with_roles(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first.rfind("--role=", 0) == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      return roles().at(first.substr(7))(Arguments(argv + 2, argv + argc));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "role %s: %s\n", first.c_str(), error.what());
      say(std::string("failed: ") + error.what());
      return 1;
    }
  }
  std::signal(SIGPIPE, SIG_IGN);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace kvq::test
