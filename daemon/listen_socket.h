// The socket clients connect to, held by exactly one daemon.
//
// Invariant: whoever holds the lock file beside the socket owns the path; only the owner unlinks or binds it. So two
// daemons that start at once cannot remove each other's socket, and a socket left by a crash is replaced. The lock file
// itself is never removed: a removed one could be locked by two.
#pragma once

#include <string>

#include "daemon/exit_code.h"

namespace kvq {

struct ListenOptions {
  std::string path;
  std::string group;  // group that may connect; empty: the socket keeps this process's group
  unsigned mode = 0660;
  const char* option = "--socket";  // what chooses the path, and the group, for messages
  const char* group_setting = "socket_group";
  int handed = -1;  // a socket from the service manager or kvq-hold, close-on-exec; owned by ListenSocket from here on
};

class ListenSocket {
 public:
  // Listens at once: a client that connects waits until the daemon accepts. A handed-over socket is
  // adopted as it is, with the mode and group that its maker gave it. Throws StartupError: already_running when
  // another daemon serves the path, environment when the machine refuses, usage when path or group cannot be right.
  explicit ListenSocket(const ListenOptions& options);
  // Closes the socket, removes it from the file system unless its maker owns it, and gives up the lock.
  ~ListenSocket();
  ListenSocket(const ListenSocket&) = delete;
  ListenSocket& operator=(const ListenSocket&) = delete;

  int fd() const { return fd_; }             // stays owned by this object; non-blocking, close-on-exec
  bool adopted() const { return adopted_; }  // handed over

 private:
  void take_lock();
  void bind_fresh(const ListenOptions& options);
  void adopt(int fd);
  void release() noexcept;

  std::string path_;
  const char* const option_;
  int lock_fd_ = -1;
  int fd_ = -1;
  bool adopted_ = false;
  bool bound_ = false;
};

// Directory part of a path: "." for a bare name.
std::string directory_of(const std::string& path);

}  // namespace kvq
