// Lock, look, bind: in this order two holders cannot remove each other's socket. The lock file stays: a removed one
// could be locked by two. It is not kvqd's own (PATH.lock), which kvqd takes as well.
#include "tools/kvq-hold/listener.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tools/kvq-hold/failure.h"

namespace kvq_hold {
namespace {

constexpr int kBacklog = 128;

[[noreturn]] void refuse(int code, const std::string& what, const std::string& fix) {
  const int error = errno;
  throw Failure(code, what + (error != 0 ? std::string(": ") + std::strerror(error) : "") + ": " + fix);
}

bool somebody_listens(const sockaddr_un& address) {
  const int probe = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool listens =
      ::connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 || errno == EAGAIN;
  ::close(probe);
  return listens;
}

}  // namespace

Listener::Listener(const std::string& path, const std::string& group, unsigned mode) : path_(path) {
  try {
    take_lock();
    bind_path(group, mode);
  } catch (...) {
    release();
    throw;
  }
}

Listener::~Listener() { release(); }

void Listener::take_lock() {
  const std::string lock_path = path_ + ".hold.lock";
  lock_ = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock_ < 0) refuse(kEnvironment, "lock file " + lock_path, "create its directory, writable for this user");
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    errno = 0;
    refuse(kAlreadyRunning, "another kvq-hold has " + path_, "stop it, or choose another --socket");
  }
}

void Listener::bind_path(const std::string& group, unsigned mode) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  errno = 0;
  if (path_.size() >= sizeof address.sun_path) {
    refuse(kUsage, "--socket has " + std::to_string(path_.size()) + " bytes", "a Unix socket's path has at most 107");
  }
  std::memcpy(address.sun_path, path_.c_str(), path_.size() + 1);
  struct stat status {};
  if (::lstat(path_.c_str(), &status) == 0) {
    errno = 0;
    if (!S_ISSOCK(status.st_mode))
      refuse(kUsage, path_ + " is not a socket", "move it away, or choose another --socket");
    const bool taken = somebody_listens(address);
    errno = 0;
    if (taken) refuse(kAlreadyRunning, "somebody listens on " + path_, "stop it, or choose another --socket");
    ::unlink(path_.c_str());
  }
  fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd_ >= 0) ::fchmod(fd_, 0600);  // Linux takes the new file's mode from it, so it never is wider than asked
  if (fd_ < 0 || ::bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    refuse(kEnvironment, "bind " + path_, "make its directory writable for this user");
  }
  bound_ = true;
  if (!group.empty()) {
    errno = 0;
    const ::group* entry = ::getgrnam(group.c_str());
    if (entry == nullptr) refuse(kUsage, "--socket-group " + group + ": no such group", "groupadd " + group);
    if (::chown(path_.c_str(), static_cast<uid_t>(-1), entry->gr_gid) != 0) {
      refuse(kEnvironment, "cannot give " + path_ + " to group " + group, "make this user a member of it");
    }
  }
  if (::chmod(path_.c_str(), mode) != 0 || ::listen(fd_, kBacklog) != 0) {
    refuse(kEnvironment, "listen on " + path_, "choose a path on a local file system");
  }
}

void Listener::release() {
  if (bound_) ::unlink(path_.c_str());
  if (fd_ >= 0) ::close(fd_);
  if (lock_ >= 0) ::close(lock_);
}

}  // namespace kvq_hold
