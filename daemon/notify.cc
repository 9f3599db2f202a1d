// sd_notify of libsystemd waits when the manager's queue is full, so the sending is done here.
#include "daemon/notify.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace kvq {
namespace {

// A manager that takes nothing while this many pile up will not come back in time to be of use.
constexpr int kMostWaitMs = 100;  // for the manager to take one descriptor, before it is queued here
constexpr std::size_t kMostWaiting = 65536;

// The address as the kernel takes it; empty when `address` is of no kind that kvqd speaks.
std::string kernel_address(const std::string& address) {
  sockaddr_un out{};
  out.sun_family = AF_UNIX;
  const bool abstract = address[0] == '@';
  if ((!abstract && address[0] != '/') || address.size() < 2 || address.size() >= sizeof out.sun_path) return "";
  std::memcpy(out.sun_path, address.data(), address.size());
  if (abstract) out.sun_path[0] = '\0';
  return {reinterpret_cast<const char*>(&out), offsetof(sockaddr_un, sun_path) + address.size() + (abstract ? 0 : 1)};
}

}  // namespace

Notify::Notify(const std::string& address, Log log) : log_(std::move(log)) {
  if (address.empty()) return;
  address_ = kernel_address(address);
  if (address_.empty()) {
    log_("event=notify_refused why=\"NOTIFY_SOCKET is " + address +
         ": it must be a path or @name of at most 107 bytes\"");
    return;
  }
  socket_ = Descriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (socket_.get() < 0) {
    give_up(std::string("socket: ") + std::strerror(errno));
    return;
  }
  const timeval most{0, kMostWaitMs * 1000};
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
}

void Notify::send(const std::string& text, int fd) {
  if (!active()) return;
  if (waiting_.empty() && try_send(text, fd) != Outcome::full) return;
  if (waiting_.size() >= kMostWaiting) return give_up(std::to_string(kMostWaiting) + " messages wait already");
  Descriptor copy;
  if (fd >= 0) {
    copy = Descriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) return give_up(std::string("a descriptor cannot be duplicated: ") + std::strerror(errno));
  }
  waiting_.push_back({text, std::move(copy)});
  if (waiting_.size() > 1) return;
  log_("event=notify_waits why=\"the service manager's queue is full; messages go out later, in order\"");
  on_waiting_();
}

bool Notify::flush() {
  if (waiting_.empty()) return true;
  while (!waiting_.empty()) {
    if (try_send(waiting_.front().text, waiting_.front().fd.get()) == Outcome::full) return false;
    if (!waiting_.empty()) waiting_.pop_front();  // giving up has emptied it
  }
  if (active()) log_("event=notify_caught_up");
  return true;
}

Notify::Outcome Notify::try_send(const std::string& text, int fd) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  msghdr message{};
  message.msg_name = address_.data();
  message.msg_namelen = static_cast<socklen_t>(address_.size());
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  // A record that counts on a descriptor is written next, so a manager that is a few messages behind gets a moment.
  const int flags = MSG_NOSIGNAL | (fd >= 0 && waiting_.empty() ? 0 : MSG_DONTWAIT);
  while (::sendmsg(socket_.get(), &message, flags) < 0) {
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:
      case ENOBUFS:
      case ENOMEM:
      case ETOOMANYREFS:  // so many descriptors are under way that the kernel wants the manager to read first
        return Outcome::full;
      default:
        give_up(std::strerror(errno));
        return Outcome::dropped;
    }
  }
  return Outcome::sent;
}

void Notify::give_up(const std::string& why) {
  log_("event=notify_lost dropped=" + std::to_string(waiting_.size()) + " why=\"" + why +
       "\" consequence=\"nothing more is kept for the next kvqd; it will start clean\"");
  socket_ = Descriptor();
  waiting_.clear();
}

std::string notify_address() {
  const char* address = std::getenv("NOTIFY_SOCKET");
  return address != nullptr ? address : "";
}

std::uint64_t watchdog_ms() {
  std::uint64_t usec = 0;
  return sd_watchdog_enabled(0, &usec) > 0 ? usec / 1000 : 0;
}

}  // namespace kvq
