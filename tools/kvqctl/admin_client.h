// One connection to kvqd's Admin capability.
//
// Invariant: every failure is a Failure with the exit code that kvqctl ends with and one line that names cause and fix.
#pragma once

#include <kj/async-io.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace kvqctl {

enum ExitCode : int {
  kOk = 0,
  kRefused = 1,   // the daemon (or the socket's mode) says no
  kUsage = 2,     // bad command line
  kNoDaemon = 3,  // nothing answers
  kBadPages = 4,  // verify found pages whose bytes are not what they were
  kUnwell = 5,    // doctor found something bad
};

struct Failure : std::runtime_error {
  Failure(ExitCode exit_code, const std::string& message) : std::runtime_error(message), exit_code(exit_code) {}
  ExitCode exit_code;
};

// Each call returns the daemon's JSON document. All throw Failure.
class AdminClient {
 public:
  // `answer_ms`: how long each answer may take.
  explicit AdminClient(const std::string& socket_path, std::uint64_t answer_ms = 10'000);
  ~AdminClient();

  std::string status();
  std::string sessions();
  std::string tenants();
  std::string pages(const std::string& tenant, const std::string& device, std::uint32_t limit);
  std::string sequences(const std::string& tenant, std::uint32_t session, const std::string& device,
                        std::uint32_t limit);
  std::string prefix(const std::string& tenant, const std::string& device, std::uint32_t limit);
  std::string quantize(const std::string& tenant, std::uint64_t idle_ms, bool dry_run);
  std::string set(const std::string& key, const std::string& value, bool dry_run, bool saved = false);
  std::string evict(const std::string& tenant, std::uint64_t idle_ms, bool dry_run);
  std::string compact(const std::string& tenant, bool dry_run);
  std::string resize(std::uint64_t arena_bytes, const std::string& device, bool dry_run);
  std::string drain(std::uint32_t deadline_ms);
  std::string evict_session(std::uint32_t session, bool kill);
  std::string verify(const std::string& tenant, std::uint32_t deadline_ms);

  // Events numbered above `after`, the newest `limit` of them.
  std::string events(std::uint64_t after, std::uint32_t limit);

  void sleep_ms(std::uint64_t ms);  // keeps the connection served

 private:
  struct Wire;
  std::unique_ptr<Wire> wire_;
};

}  // namespace kvqctl
