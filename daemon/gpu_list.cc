// One pipe for all that the program says.
#include "daemon/gpu_list.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>

#include "daemon/device/worker_process.h"

extern char** environ;

namespace kvq {
namespace {

constexpr std::string_view kName = "kvqd-gpu: ";  // before its reasons
constexpr int kEndMs = 2000;                      // for its end, once it has been killed
constexpr std::size_t kMostBytes = 64 << 10;      // hundreds of lines

// What the program at the other end writes, until it ends or the time is over.
std::string read_all(int fd, int most_ms, bool& in_time) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::milliseconds(most_ms);
  std::string out;
  char piece[4096];
  while (out.size() < kMostBytes) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    pollfd wanted{fd, POLLIN, 0};
    in_time = left > 0 && ::poll(&wanted, 1, static_cast<int>(left)) == 1;
    if (!in_time) return out;
    const ssize_t got = ::read(fd, piece, sizeof piece);
    if (got <= 0) return out;
    out.append(piece, static_cast<std::size_t>(got));
  }
  return out;
}

std::string end_of(pid_t pid, bool in_time, int most_ms) {
  const Descriptor pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pollfd ended{pidfd.get(), POLLIN, 0};
  if (in_time) ::poll(&ended, 1, kEndMs);  // its output was over: so is it, in a moment
  int status = 0;
  if (::waitpid(pid, &status, WNOHANG) == pid) {
    return WIFEXITED(status) ? "it ended with exit code " + std::to_string(WEXITSTATUS(status))
                             : "it ended with signal " + std::to_string(WTERMSIG(status));
  }
  if (pidfd.get() >= 0 && end_process(pidfd.get(), kEndMs)) ::waitpid(pid, &status, WNOHANG);
  return "it did not end within " + std::to_string(most_ms) + " ms";
}

}  // namespace

GpuList read_gpu_list(const std::string& text, const std::string& program, const std::string& ended) {
  GpuList out;
  std::string said;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::string uuid, name;
    std::uint64_t bytes = 0;
    std::istringstream(line) >> uuid >> name >> bytes;
    if (!uuid.starts_with("GPU-") && !uuid.starts_with("MIG-")) {
      if (said.empty()) said = line.substr(line.starts_with(kName) ? kName.size() : 0);
    } else if (std::find(out.uuids.begin(), out.uuids.end(), uuid) == out.uuids.end()) {
      out.uuids.push_back(uuid);
      out.most_bytes = std::max(out.most_bytes, bytes);
    }
  }
  if (out.uuids.empty()) out.why_not = program + " finds no GPU to work with: " + (said.empty() ? ended : said);
  return out;
}

GpuList list_gpus(const std::string& program, int most_ms) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    return {{}, 0, std::string("a pipe for the list of GPUs: ") + std::strerror(errno)};
  const Descriptor from(ends[0]);
  Descriptor to(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, to.get(), 1);
  ::posix_spawn_file_actions_adddup2(&actions, to.get(), 2);
  std::string list = "--list", name = program;
  char* arguments[] = {name.data(), list.data(), nullptr};
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, name.c_str(), &actions, nullptr, arguments, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    const std::string why = std::strerror(error);
    return {{}, 0, program + " cannot be started: " + why + "; install kvqd-gpu, or give its path with --gpu-worker"};
  }
  to = Descriptor();
  bool in_time = false;
  const std::string said = read_all(from.get(), most_ms, in_time);
  const std::string ended = end_of(pid, in_time, most_ms);
  if (!in_time && said.empty())
    return {{}, 0, program + " --list: " + ended + "; the driver hangs: look at nvidia-smi"};
  return read_gpu_list(said, program, ended);
}

}  // namespace kvq
