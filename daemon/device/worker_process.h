// The worker as a process: started with exactly the descriptors of its protocol, watched by its pidfd.
//
// Invariant: starting costs a fork and an exec, nothing else here waits. The pidfd becomes readable when the process is
// gone with all that it had open, so from then on nothing of it touches the GPU. The destructor kills and, for a short
// while, waits, so that no zombie is left.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "daemon/shm/descriptor.h"
#include "kvq/result.h"

namespace kvq {

// Duplicates that the child gets, in the protocol's order.
struct WorkerDescriptors {
  int socket = -1, rings = -1, worker_bell = -1, daemon_bell = -1;
};

class WorkerProcess {
 public:
  // `program`: path, then arguments. native: errno, such as ENOENT.
  static Result<WorkerProcess> start(const std::vector<std::string>& command, const WorkerDescriptors& descriptors);

  WorkerProcess() = default;
  WorkerProcess(WorkerProcess&&) noexcept = default;
  WorkerProcess& operator=(WorkerProcess&& other) noexcept;
  ~WorkerProcess();

  int pidfd() const { return pidfd_.get(); }
  pid_t pid() const { return pid_; }
  void kill() const;
  // Whether it is gone. `how`: "exit code 1", "signal 9".
  bool ended(std::string& how, int most_ms = 0);

 private:
  Descriptor pidfd_;
  pid_t pid_ = -1;
  std::string how_;  // once it has been seen to be gone
};

// SIGKILL to whatever process `pidfd` names, then waits for its end for at most `most_ms`. For start-up: an earlier
// kvqd's worker is no child of this one.
bool end_process(int pidfd, int most_ms);

}  // namespace kvq
