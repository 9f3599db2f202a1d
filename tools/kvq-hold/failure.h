// Why kvq-hold cannot go on, and with which code it ends. Codes 0 to 4 mean what they mean for kvqd.
#pragma once

#include <stdexcept>
#include <string>

namespace kvq_hold {

enum ExitCode : int {
  kOk = 0,
  kUsage = 2,
  kAlreadyRunning = 3,
  kEnvironment = 4,
  kGaveUp = 5,      // the daemon died too often
  kCannotRun = 127  // the program cannot be executed
};

// One line that names cause and fix.
struct Failure : std::runtime_error {
  Failure(int code, const std::string& message) : std::runtime_error(message), code(code) {}
  int code;
};

}  // namespace kvq_hold
