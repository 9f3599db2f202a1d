// The socket that metrics are asked for on: a loopback port, or a Unix socket with a lock of its own.
//
// Invariant: nothing but loopback and the file system is ever bound. The constructor has bound and listens, or throws
// StartupError with cause and fix.
#pragma once

#include <memory>
#include <string>

#include "daemon/listen_socket.h"

namespace kvq {

struct MetricsSocketOptions {
  std::string path;   // of a Unix socket; else host and port hold
  std::string group;  // that may connect to it
  std::string host;   // 127.0.0.1 or ::1
  std::uint16_t port = 0;
};

class MetricsSocket {
 public:
  explicit MetricsSocket(const MetricsSocketOptions& options);
  ~MetricsSocket();
  MetricsSocket(const MetricsSocket&) = delete;
  MetricsSocket& operator=(const MetricsSocket&) = delete;

  int fd() const { return unix_ != nullptr ? unix_->fd() : tcp_; }  // stays owned by this object

 private:
  std::unique_ptr<ListenSocket> unix_;
  int tcp_ = -1;
};

}  // namespace kvq
