// A model server that decodes without end, checks whatever it reads, and measures how long the daemon made it wait.
//
// Invariant: it says nothing wrong was read by going on: the first wrong byte ends its process with a message, and the
// test's next call on it throws.
#pragma once

#include <cstdint>
#include <string>

#include "tests/support/role_process.h"

namespace kvq::test {

// Since the last report. A turn: reserve, append, step, commit. An attach: a round trip to the daemon.
struct DecoderReport {
  std::uint64_t turns = 0;
  double turn_p50_ms = 0, turn_p99_ms = 0, turn_max_ms = 0;
  double attach_p50_ms = 0, attach_p99_ms = 0, attach_max_ms = 0;
  std::uint64_t quantized_calls = 0;  // attention calls that read at least one quantized page
  std::uint32_t reconnects = 0;       // times its session was resumed, since it began
  std::uint32_t session = 0;
  std::string text() const;
};

class DecoderProcess {
 public:
  // `stream`: which tokens; two decoders of one tenant take different ones.
  DecoderProcess(const std::string& socket, std::uint32_t stream);
  DecoderReport report();  // and starts counting anew
  void decode_for(std::uint32_t ms);
  pid_t pid() const { return process_.pid(); }
  // Ends it in good order; its exit code, which is 0 only if everything it read was right.
  int end();

 private:
  RoleProcess process_;
};

}  // namespace kvq::test
