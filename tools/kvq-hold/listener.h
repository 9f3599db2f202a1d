// The listening socket, held here so that clients wait in its backlog while the daemon is down.
//
// Invariant: whoever holds the lock file beside the path owns it; a socket somebody listens on is never removed.
#pragma once

#include <string>

namespace kvq_hold {

class Listener {
 public:
  // `group` may be empty. Throws Failure.
  Listener(const std::string& path, const std::string& group, unsigned mode);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int fd() const { return fd_; }

 private:
  void take_lock();
  void bind_path(const std::string& group, unsigned mode);
  void release();

  std::string path_;
  int lock_ = -1, fd_ = -1;
  bool bound_ = false;
};

}  // namespace kvq_hold
