// Eventfds shared with a client, used so that the client can never stop the daemon.
//
// Invariant: neither call waits longer than kMostWaitMs. The two sides share the file's flags, so a client may clear
// O_NONBLOCK at any moment, and fill or empty the counter: reading is safe by RWF_NOWAIT; writing, which has no such
// flag, runs under a timer whose signal interrupts it.
#pragma once

#include <time.h>

#include <cstdint>

namespace kvq {

class Bell {
 public:
  static constexpr std::uint32_t kMostWaitMs = 20;

  // Loop thread, which also makes all calls. Throws kj::Exception when the kernel gives no timer.
  Bell();
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  // Makes it readable for the client. False when the client got the daemon stuck: it broke the contract on purpose.
  bool ring(int eventfd);
  // Takes what the client wrote.
  static void silence(int eventfd);

 private:
  timer_t timer_{};
};

}  // namespace kvq
