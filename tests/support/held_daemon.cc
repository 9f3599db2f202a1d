// Invariant: everything of one test lies in a directory of its own.
#include "tests/support/held_daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/support/programs.h"

extern char** environ;

namespace kvq::test {
namespace {

std::uint32_t count(const std::string& text, const std::string& word) {
  std::uint32_t n = 0;
  for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

HeldDaemon::HeldDaemon(const std::string& settings, const std::vector<std::string>& environment,
                       const std::string& program) {
  char pattern[] = "/tmp/kvq-test-XXXXXX";
  if (::mkdtemp(pattern) == nullptr) throw std::runtime_error("mkdtemp");
  directory_ = pattern;
  ::chmod(pattern, 0755);
  socket_ = directory_ + "/kvqd.sock";
  program_ = directory_ + "/kvqd";
  std::filesystem::create_symlink(program.empty() ? program_path(KVQD_PATH) : program, program_);
  std::vector<std::string> arguments = {program_path(KVQ_HOLD_PATH), "--socket", socket_, "--restart-ms", "1",
                                        "--give-up-after",           "1000000",  "--",    program_};
  for (std::string& a : kvqd_arguments(directory_, "socket = \"" + socket_ + "\"\n" + settings)) {
    arguments.push_back(std::move(a));
  }
  std::vector<char*> argv, env;
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  std::vector<std::string> added = environment;
  added.push_back("KVQ_KILL_PLAN=" + directory_ + "/plan");
  added.push_back("KVQ_KILL_LOG=" + directory_ + "/reached");
  const auto replaced = [&](const char* variable) {
    const std::string name(variable, std::strcspn(variable, "=") + 1);
    return std::any_of(added.begin(), added.end(), [&](const std::string& a) { return a.rfind(name, 0) == 0; });
  };
  for (char** e = environ; *e != nullptr; ++e) {
    if (!replaced(*e)) env.push_back(*e);
  }
  for (const std::string& a : added) env.push_back(const_cast<char*>(a.c_str()));
  env.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, (directory_ + "/log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  const int error = ::posix_spawn(&holder_, argv[0], &actions, nullptr, argv.data(), env.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error(program_path(KVQ_HOLD_PATH) + ": " + std::strerror(error));
  await_lives(1);
}

HeldDaemon::~HeldDaemon() {
  ::kill(holder_, SIGTERM);
  int status = 0;
  ::waitpid(holder_, &status, 0);
  if (std::getenv("KVQ_TEST_KEEP") == nullptr) std::filesystem::remove_all(directory_);
}

pid_t HeldDaemon::pid() const {
  pid_t pid = 0;
  std::ifstream(socket_ + ".lock") >> pid;
  return pid > 0 && ::kill(pid, 0) == 0 ? pid : 0;
}

void HeldDaemon::kill() {
  if (const pid_t victim = pid(); victim > 0) ::kill(victim, SIGKILL);
}

void HeldDaemon::upgrade() { ::kill(holder_, SIGHUP); }

void HeldDaemon::replace_program(const std::string& program) {
  std::filesystem::create_symlink(program, program_ + ".new");
  std::filesystem::rename(program_ + ".new", program_);
}

std::uint32_t HeldDaemon::lives() const { return count(log(), "event=ready"); }

void HeldDaemon::await_lives(std::uint32_t wanted) const {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (lives() < wanted) {
    int status = 0;
    if (::waitpid(holder_, &status, WNOHANG) == holder_) throw std::runtime_error("the holder ended: " + log());
    if (std::chrono::steady_clock::now() > until) throw std::runtime_error("kvqd did not come back: " + log());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void HeldDaemon::plan(const std::string& point, std::uint64_t n, const std::string& how) const {
  std::ofstream(directory_ + "/plan.new") << point << " " << n << " " << how << "\n";
  std::filesystem::rename(directory_ + "/plan.new", directory_ + "/plan");
}

bool HeldDaemon::plan_is_done() const { return !std::filesystem::exists(directory_ + "/plan"); }

std::set<std::string> HeldDaemon::reached() const {
  std::set<std::string> out;
  std::ifstream file(directory_ + "/reached");
  for (std::string line; std::getline(file, line);) out.insert(line);
  return out;
}

std::string HeldDaemon::log() const { return text_of(directory_ + "/log"); }

std::uint32_t HeldDaemon::descriptors_held() const {
  std::uint32_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(holder_) + "/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    const bool kept = target.find("memfd:kvq-") != std::string::npos || target.find("pidfd") != std::string::npos ||
                      target.find("eventfd") != std::string::npos;
    n += kept ? 1 : 0;
  }
  return n;
}

}  // namespace kvq::test
