// sendmsg and recvmsg with SCM_RIGHTS.
#include "daemon/gpu/worker_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace kvq::gpu {
namespace {

constexpr std::size_t kLongestMore = sizeof(Hello) > sizeof(Model) ? sizeof(Hello) : sizeof(Model);

// Also: too many descriptors are under way, which ends when the other side reads.
bool passes(int error) { return error == EAGAIN || error == ENOBUFS || error == ENOMEM || error == ETOOMANYREFS; }

}  // namespace

void WorkerSocket::send(const Message& message, int file, std::span<const std::byte> more) {
  if (broken_) return;
  flush();
  if (queue_.empty() && send_now(message, file, more)) return;
  if (broken_) return;
  Packet packet{message, {more.begin(), more.end()}, Descriptor(file < 0 ? -1 : ::fcntl(file, F_DUPFD_CLOEXEC, 0))};
  queue_.push_back(std::move(packet));
}

void WorkerSocket::flush() {
  while (!queue_.empty() && !broken_) {
    const Packet& packet = queue_.front();
    if (!send_now(packet.message, packet.file.get(), packet.more)) return;
    queue_.pop_front();
  }
}

bool WorkerSocket::send_now(const Message& message, int file, std::span<const std::byte> more) {
  iovec parts[2] = {{const_cast<Message*>(&message), sizeof(message)},
                    {const_cast<std::byte*>(more.data()), more.size()}};
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = more.empty() ? 1 : 2;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (file >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &file, sizeof(int));
  }
  for (;;) {
    if (::sendmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return true;
    if (errno == EINTR) continue;
    broken_ = !passes(errno);
    return false;
  }
}

WorkerSocket::Got WorkerSocket::receive(Packet& packet) {
  std::byte more[kLongestMore];
  iovec parts[2] = {{&packet.message, sizeof(Message)}, {more, sizeof(more)}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = 2;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t got = -1;
  do {
    got = ::recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && passes(errno)) return Got::nothing;
  if (got < static_cast<ssize_t>(sizeof(Message))) return Got::end;
  packet.message.text[sizeof(packet.message.text) - 1] = 0;
  packet.more.assign(more, more + (got - static_cast<ssize_t>(sizeof(Message))));
  packet.file = Descriptor();
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len != CMSG_LEN(sizeof(int))) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(c), sizeof(int));
    packet.file = Descriptor(fd);
  }
  return Got::message;
}

void set_text(Message& message, const char* text) {
  std::strncpy(message.text, text, sizeof(message.text) - 1);
  message.text[sizeof(message.text) - 1] = 0;
}

}  // namespace kvq::gpu
