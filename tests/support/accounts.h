// What a daemon owes to nobody: an operator's calls that outlive its deaths, and the books at the end of a test.
#pragma once

#include <cstdint>
#include <string>

#include "tests/support/held_daemon.h"

namespace kvq::test {

// As `kvqctl set` and `kvqctl verify`: repeated over the daemon's deaths, at most half a minute. Throw after that.
void operate(const std::string& socket, const std::string& key, const std::string& value);
void verify_all(const std::string& socket);

// The books of a daemon that nobody uses any more.
class Books {
 public:
  // Opens them: notes what daemon and holder have open now, when nobody uses them. `tenants`: that exist already.
  // `gpu`: the worker's pidfd and a mirror for each tenant are kept, too.
  Books(const HeldDaemon& daemon, std::uint32_t tenants, bool gpu = false);
  // After every client has gone: drops all that is cached, and waits until nothing is charged to anybody, nothing is in
  // limbo, no slab is left and no descriptor more is open than at first. Empty, or what is left after 20 seconds.
  std::string close() const;

 private:
  const HeldDaemon& daemon_;
  std::uint32_t held_, open_;
};

std::uint32_t open_descriptors(pid_t process);

}  // namespace kvq::test
