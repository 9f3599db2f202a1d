// Starting the daemon the way a service manager does, and what its end means.
//
// Invariant: the child inherits exactly the descriptors it is passed (from 3 on, in order) besides 0, 1 and 2, has the
// signal settings of a fresh program, and gets SIGTERM when its parent dies.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace kvq_hold {

struct Passed {
  std::string name;
  int fd = -1;
};

// What this process was started with, besides 0, 1 and 2, is not for the child. Once, before anything is opened.
void keep_from_child();

// Its pid. Throws Failure when no process can be made. A program that cannot be executed ends with kCannotRun.
pid_t start_child(const std::vector<std::string>& argv, const std::vector<Passed>& passed,
                  const std::string& notify_address);

struct End {
  int exit_code = 0;  // when signal is 0
  int signal = 0;
  // Not of its own choice: worth another start. 6: its pages ended with a GPU's worker (daemon/exit_code.h).
  bool died() const { return signal != 0 || exit_code == 1 || exit_code == 6; }
  std::string text() const;
};

End end_of(int wait_status);

}  // namespace kvq_hold
