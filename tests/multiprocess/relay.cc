// Invariant: descriptors pass through, so that the client between whose bytes are recorded gets its memory and works.
#include "tests/multiprocess/relay.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

// Moves what is there; false at the end. What went by is added to `seen`.
bool pass(int from, int to, std::string* seen) {
  char bytes[1 << 16];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 16)];
  iovec piece{bytes, sizeof(bytes)};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = ::recvmsg(from, &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) return false;
  if (seen != nullptr) seen->append(bytes, static_cast<std::size_t>(got));
  piece.iov_len = static_cast<std::size_t>(got);
  const bool sent = ::sendmsg(to, &message, MSG_NOSIGNAL) == got;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
    for (std::size_t i = 0; i < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
      ::close(fd);
    }
  }
  return sent;
}

std::vector<std::string> split(const std::string& bytes) {
  std::vector<std::string> out;
  const auto number = [&](std::size_t at) {
    std::uint32_t value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    return std::size_t{value};
  };
  for (std::size_t at = 0; at + 8 <= bytes.size();) {
    const std::size_t segments = number(at) + 1;
    std::size_t size = (4 + 4 * segments + 7) / 8 * 8;
    for (std::size_t i = 0; i < segments; ++i) size += 8 * number(at + 4 + 4 * i);
    out.push_back(bytes.substr(at, size));
    at += size;
  }
  return out;
}

}  // namespace

RawSocket::RawSocket(const std::string& path) : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  const sockaddr_un address = address_of(path);
  if (::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return;
  ::close(fd_);
  throw std::runtime_error("connect " + path);
}

RawSocket::~RawSocket() { ::close(fd_); }

bool RawSocket::send(const std::string& bytes, const std::vector<int>& descriptors) {
  iovec piece{const_cast<char*>(bytes.data()), bytes.size()};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * descriptors.size()));
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  }
  return ::sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

void RawSocket::take_replies() {
  char bytes[4096];
  while (::recv(fd_, bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
  }
}

std::vector<std::string> record(const std::string& socket) {
  char folder[] = "/tmp/kvq-relay-XXXXXX";
  if (::mkdtemp(folder) == nullptr) throw std::logic_error("mkdtemp");
  const std::string path = std::string(folder) + "/relay.sock";
  const sockaddr_un address = address_of(path);
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 || ::listen(listener, 1) != 0)
    throw std::logic_error("bind " + path);
  std::string problem;
  std::thread client([&] {
    try {
      TinyModel tiny(path, {});
      const auto tokens = token_stream(5, 128);
      Sequence sequence = tiny.model().open({});
      tiny.write(sequence, 0, tokens);
      tiny.await_cached(tokens, 128);
      Sequence again = tiny.model().open(tokens);
      check(kvq_credits_request(tiny.get(), 6, 5000));
    } catch (const std::exception& error) {
      problem = error.what();
    }
  });
  const int inner = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  std::string bytes;
  {
    const RawSocket outer(socket);
    ::fcntl(outer.fd(), F_SETFL, 0);
    for (;;) {
      pollfd ends[] = {{inner, POLLIN, 0}, {outer.fd(), POLLIN, 0}};
      ::poll(ends, 2, -1);
      if (ends[0].revents != 0 && !pass(inner, outer.fd(), &bytes)) break;
      if (ends[1].revents != 0 && !pass(outer.fd(), inner, nullptr)) break;
    }
  }
  ::close(inner);
  client.join();
  ::close(listener);
  std::filesystem::remove_all(folder);
  const std::vector<std::string> messages = split(bytes);
  if (!problem.empty() || messages.size() < 5) throw std::logic_error("nothing recorded: " + problem);
  return messages;
}

}  // namespace kvq::test
