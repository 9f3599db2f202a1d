// The manager's end of the notify protocol: one datagram, one request.
//
// Invariant: any bytes are answered with a Message whose descriptors the caller owns and whose `problem` says why it
// must be refused; nothing a sender writes can make receive() fail, wait or grow beyond one message.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace kvq_hold {

struct Message {
  pid_t sender = 0;  // as the kernel says; 0: it does not
  std::vector<int> fds;
  bool store = false, remove = false, ready = false;
  std::string name;     // FDNAME=, "stored" without
  std::string problem;  // empty: well-formed
};

// Fills all but sender and fds, which only tells how many there are.
void parse(const std::string& text, std::size_t fds, Message& out);

class NotifySocket {
 public:
  NotifySocket();  // in a folder that only this user may enter. Throws Failure.
  ~NotifySocket();
  NotifySocket(const NotifySocket&) = delete;
  NotifySocket& operator=(const NotifySocket&) = delete;

  int fd() const { return fd_; }
  const std::string& address() const { return path_; }  // for NOTIFY_SOCKET
  std::optional<Message> receive();                     // none: the queue is empty

 private:
  std::string folder_, path_;
  int fd_ = -1;
};

}  // namespace kvq_hold
