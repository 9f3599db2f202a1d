// Runs the daemon, holds what it gives away, and starts it again with that.
//
// Invariant: descriptors are taken from the running child only, also those it sent right before it died; they stay held
// until it removes them, ends of its own choice, or dies too often. They are handed on newest first, as systemd does.
// One thread, one poll.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "tools/kvq-hold/child.h"
#include "tools/kvq-hold/descriptor_store.h"
#include "tools/kvq-hold/notify_socket.h"

namespace kvq_hold {

struct Options {
  std::string socket, socket_group;  // empty: the daemon makes its own
  unsigned socket_mode = 0660;
  std::uint64_t restart_ms = 200;
  std::uint64_t give_up_after = 5;  // deaths within within_ms
  std::uint64_t within_ms = 60'000;
  std::size_t max_descriptors = 100'000;
  std::vector<std::string> command;
};

class Holder {
 public:
  // `listening_fd`: -1, or the socket to pass, which stays the caller's. Throws Failure.
  Holder(const Options& options, int listening_fd);
  ~Holder();
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  int run();  // the exit code

 private:
  void start();
  void take_messages(std::size_t most);
  void take(Message& message);
  void refuse(const std::string& why);
  void on_signal(int signal);
  void reap();
  void ended(const End& end);
  void died(const End& end);
  void finish(int exit_code);

  const Options options_;
  const int listening_fd_;
  NotifySocket notify_;
  DescriptorStore store_;
  int signals_ = -1;
  pid_t child_ = 0;                // 0: none runs
  bool ready_ = false;             // it said so
  bool ending_ = false;            // SIGTERM was passed on
  bool restarting_ = false;        // SIGHUP was: its end is no death
  std::uint64_t start_at_ms_ = 0;  // when no child runs
  std::deque<std::uint64_t> deaths_ms_;
  std::uint64_t refusals_ = 0, refusals_since_ms_ = 0;
  bool done_ = false;
  int exit_code_ = 0;
};

}  // namespace kvq_hold
