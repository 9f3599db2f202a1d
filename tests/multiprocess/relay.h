// Sockets without a protocol, and what libkvq really sends: recorded by standing between it and kvqd.
#pragma once

#include <string>
#include <vector>

namespace kvq::test {

class RawSocket {
 public:
  explicit RawSocket(const std::string& path);  // throws std::runtime_error
  ~RawSocket();
  RawSocket(const RawSocket&) = delete;
  RawSocket& operator=(const RawSocket&) = delete;
  int fd() const { return fd_; }
  // With descriptors; false when the daemon has hung up or its queue is full.
  bool send(const std::string& bytes, const std::vector<int>& descriptors = {});
  void take_replies();

 private:
  int fd_ = -1;
};

// The messages of one client that registers, writes, attaches and leaves.
std::vector<std::string> record(const std::string& socket);

}  // namespace kvq::test
