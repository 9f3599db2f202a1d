// The descriptors kvqd was started with: the listening socket, and what an earlier daemon left.
//
// Invariant: taken once, before anything else is opened; each is closed on exec, has one owner, and the environment
// that named them is cleared.
#pragma once

#include <string>
#include <vector>

#include "daemon/exit_code.h"
#include "daemon/store.h"

namespace kvq {

struct Intake {
  Descriptor socket;                  // -1: none was handed over
  Kept kept;                          // names that start with "kvq-"
  std::vector<std::string> warnings;  // what was closed, and why
};

// LISTEN_FDS and LISTEN_FDNAMES. A socket is the one to listen on, whatever its name. Throws StartupError{usage} when
// there are two, or the environment makes no sense.
Intake take_descriptors();

}  // namespace kvq
