// Invariant: a server starts by exec, never by fork alone, since CUDA does not survive a fork.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

#include "tests/bench/gpu_node/roles.h"

extern char** environ;

namespace kvq::bench {
namespace {

constexpr char kMpsFolder[] = "/tmp/kvq-bench-mps";

}  // namespace

Server::Server(const std::string& role, const std::vector<std::string>& options,
               const std::vector<std::string>& environment) {
  std::vector<std::string> words = {"/proc/self/exe", "--role", role};
  words.insert(words.end(), options.begin(), options.end());
  std::vector<char*> argv, env;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  for (char** e = environ; *e != nullptr; ++e) env.push_back(*e);
  std::vector<std::string> added = environment;
  for (std::string& e : added) env.push_back(e.data());
  env.push_back(nullptr);
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe[1], 1);
  const int error = ::posix_spawn(&pid_, words[0].c_str(), &actions, nullptr, argv.data(), env.data());
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe[1]);
  out_ = pipe[0];
  if (error != 0) throw std::runtime_error("cannot start a server process");
}

Server::~Server() {
  kill();
  ::close(out_);
}

void Server::kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void Server::signal(int number) {
  if (pid_ >= 0) ::kill(pid_, number);
}

std::string Server::line() {
  for (;;) {
    const auto end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string out = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return out;
    }
    char piece[4096];
    const ssize_t got = ::read(out_, piece, sizeof piece);
    if (got <= 0) throw std::runtime_error("a server process ended early");
    buffer_.append(piece, static_cast<std::size_t>(got));
  }
}

void Server::await(const std::string& word) {
  while (line() != word) {
  }
}

nlohmann::json Server::next() { return nlohmann::json::parse(line()); }

nlohmann::json Server::result() {
  nlohmann::json out = next();
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw std::runtime_error("a server failed: " + out.dump());
  return out;
}

Mps::Mps() {
  const std::string folder = kMpsFolder;
  works_ = std::system(("mkdir -p " + folder + " && CUDA_MPS_PIPE_DIRECTORY=" + folder +
                        " CUDA_MPS_LOG_DIRECTORY=" + folder + " nvidia-cuda-mps-control -d >/dev/null 2>&1")
                           .c_str()) == 0;
}

Mps::~Mps() {
  if (!works_) return;
  const std::string folder = kMpsFolder;
  [[maybe_unused]] const int ended = std::system(
      ("echo quit | CUDA_MPS_PIPE_DIRECTORY=" + folder + " timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1")
          .c_str());
}

std::vector<std::string> Mps::environment() const { return {std::string("CUDA_MPS_PIPE_DIRECTORY=") + kMpsFolder}; }

}  // namespace kvq::bench
