// How kvqd ends, and how start-up says why. systemd and operators read these numbers: never renumber.
#pragma once

#include <stdexcept>
#include <string>

namespace kvq {

enum class ExitCode : int {
  ok = 0,               // ended on request, or only asked for --help, --version, --check-config
  failure = 1,          // failed while running
  usage = 2,            // bad command line or configuration
  already_running = 3,  // another daemon serves this socket
  environment = 4,      // the machine does not allow it: limits, memory, directories, processor
                        // 5 is kvq-hold's: it gave up
  pages_lost = 6,       // a GPU's pages ended with its worker (legacy export): to be started again, clean
};

// A start-up step that cannot go on. One line that names cause and fix; main prints it and exits with `code`.
class StartupError : public std::runtime_error {
 public:
  StartupError(ExitCode code, const std::string& message) : std::runtime_error(message), code(code) {}
  const ExitCode code;
};

}  // namespace kvq
