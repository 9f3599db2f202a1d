// KVQ_KILL_PLAN=PATH: if that file exists when kvqd starts and says "POINT N", kvqd removes it and kills itself the
// N-th time that it comes to that point; so the next one lives. "POINT N stop": it stops itself there, for tests that
// do something meanwhile. KVQ_KILL_LOG=PATH: a line there for each point when a process first reaches it. Only in
// builds with KVQ_KILL_POINTS.
#include "daemon/kill_at.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>

#include "kvq/kill_point.h"

namespace kvq {

#if defined(KVQ_KILL_POINTS)
namespace {

std::string plan_path, wanted, how;
std::uint64_t times_left = 0;
int log_fd = -1;
bool reached[kKillPoints] = {};

void at_point(KillPoint point) {
  bool& seen = reached[static_cast<std::size_t>(point)];
  if (log_fd >= 0 && !seen) {
    const std::string line = std::string(name(point)) + "\n";
    [[maybe_unused]] const ssize_t written = ::write(log_fd, line.data(), line.size());
  }
  seen = true;
  if (times_left == 0 || wanted != name(point) || --times_left > 0) return;
  ::unlink(plan_path.c_str());
  ::kill(::getpid(), how == "stop" ? SIGSTOP : SIGKILL);
}

}  // namespace

void kill_where_told() {
  const char* plan = std::getenv("KVQ_KILL_PLAN");
  const char* log = std::getenv("KVQ_KILL_LOG");
  if (log != nullptr) log_fd = ::open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (plan != nullptr) {
    plan_path = plan;
    std::ifstream(plan_path) >> wanted >> times_left >> how;
  }
  if (times_left > 0 || log_fd >= 0) kill_point_hook = at_point;
}
#else
void kill_where_told() {}
#endif

}  // namespace kvq
