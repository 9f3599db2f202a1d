// What kvqd tells its service manager, by the notify protocol: datagrams of NAME=VALUE lines, some with a descriptor.
//
// Invariant: no call waits longer than a tenth of a second, and only one with a descriptor waits at all. What the
// manager's full queue does not take is kept here with a duplicate of its descriptor and goes out later, in the order
// of the calls. A manager that is gone is said once; then all is dropped. Without an address every call does nothing,
// so that kvqd runs the same from a shell.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "daemon/shm/descriptor.h"

namespace kvq {

class Notify {
 public:
  using Log = std::function<void(const std::string& line)>;  // key=value text

  // `address` as NOTIFY_SOCKET has it: a path, or '@' and an abstract name. Empty: nobody is told anything.
  Notify(const std::string& address, Log log);

  bool active() const { return socket_.get() >= 0; }
  void send(const std::string& text, int fd = -1);
  // Sends what waits, as far as the manager takes it. True when nothing is left.
  bool flush();
  std::size_t waiting() const { return waiting_.size(); }
  // Called when messages begin to wait: whoever has a loop then calls flush() now and again until it returns true.
  void on_waiting(std::function<void()> call) { on_waiting_ = std::move(call); }

 private:
  struct Message {
    std::string text;
    Descriptor fd;
  };
  enum class Outcome { sent, full, dropped };
  Outcome try_send(const std::string& text, int fd);
  void give_up(const std::string& why);

  Log log_;
  std::function<void()> on_waiting_ = [] {};
  std::string address_;  // sockaddr_un as bytes
  Descriptor socket_;
  std::deque<Message> waiting_;
};

// NOTIFY_SOCKET, empty without.
std::string notify_address();

// How often the manager expects WATCHDOG=1, 0: never.
std::uint64_t watchdog_ms();

}  // namespace kvq
