// Receives with the sender's credentials, which the kernel checks, and up to as many descriptors as the kernel passes.
#include "tools/kvq-hold/notify_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "tools/kvq-hold/failure.h"

namespace kvq_hold {
namespace {

constexpr std::size_t kMostBytes = 4096;  // of a message, as systemd has it
constexpr std::size_t kMostFds = 253;     // SCM_MAX_FD of the kernel
constexpr std::size_t kMostNameBytes = 255;

bool valid_name(const std::string& name) {
  return !name.empty() && name.size() <= kMostNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 127 && c != ':'; });
}

// Takes sender and descriptors out of the control part.
void read_control(msghdr& header, Message& out) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET) continue;
    const std::size_t bytes = part->cmsg_len - CMSG_LEN(0);
    if (part->cmsg_type == SCM_RIGHTS) {
      const std::size_t count = bytes / sizeof(int);
      out.fds.resize(count);
      std::memcpy(out.fds.data(), CMSG_DATA(part), count * sizeof(int));
    } else if (part->cmsg_type == SCM_CREDENTIALS && bytes >= sizeof(ucred)) {
      ucred credentials{};
      std::memcpy(&credentials, CMSG_DATA(part), sizeof credentials);
      out.sender = credentials.pid;
    }
  }
}

}  // namespace

void parse(const std::string& text, std::size_t fds, Message& out) {
  out.name = "stored";
  if (text.find('\0') != std::string::npos) {
    out.problem = "it holds a zero byte";
    return;
  }
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line == "FDSTORE=1") out.store = true;
    if (line == "FDSTOREREMOVE=1") out.remove = true;
    if (line == "READY=1") out.ready = true;
    if (line.rfind("FDNAME=", 0) == 0) out.name = line.substr(7);
    // FDPOLL= asks not to drop descriptors that hang up: none is dropped here. Other fields mean nothing here.
  }
  if (!valid_name(out.name)) out.problem = "FDNAME is not 1 to 255 printable characters without ':'";
  if (out.store && out.remove) out.problem = "it stores and removes at once";
  if (out.store && fds == 0) out.problem = "FDSTORE=1 without a descriptor";
  if (!out.store && fds > 0) out.problem = std::to_string(fds) + " descriptors without FDSTORE=1";
}

NotifySocket::NotifySocket() {
  const char* base = std::getenv("TMPDIR");
  folder_ = std::string(base != nullptr && *base != '\0' ? base : "/tmp") + "/kvq-hold-XXXXXX";
  if (::mkdtemp(folder_.data()) == nullptr) {
    throw Failure(kEnvironment, "folder " + folder_ + ": " + std::strerror(errno) + ": set TMPDIR to a writable one");
  }
  path_ = folder_ + "/notify";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int on = 1;
  std::string problem;
  if (path_.size() >= sizeof address.sun_path) {
    problem = "it is longer than 107 bytes";
  } else {
    std::memcpy(address.sun_path, path_.c_str(), path_.size() + 1);
    fd_ = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    // The credentials are asked for before anybody can send: a message without them could not be judged.
    if (fd_ < 0 || ::setsockopt(fd_, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0 ||
        ::bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      problem = std::strerror(errno);
    }
  }
  if (problem.empty()) return;
  if (fd_ >= 0) ::close(fd_);
  ::rmdir(folder_.c_str());
  throw Failure(kEnvironment, "notify socket " + path_ + ": " + problem + ": set TMPDIR to a short, local path");
}

NotifySocket::~NotifySocket() {
  ::close(fd_);
  ::unlink(path_.c_str());
  ::rmdir(folder_.c_str());
}

std::optional<Message> NotifySocket::receive() {
  std::array<char, kMostBytes> text;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(kMostFds * sizeof(int))> control;
  iovec part{text.data(), text.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t got;
  do {
    got = ::recvmsg(fd_, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return std::nullopt;
  Message out;
  read_control(header, out);
  parse(std::string(text.data(), static_cast<std::size_t>(got)), out.fds.size(), out);
  if (header.msg_flags & MSG_TRUNC) out.problem = "it is longer than " + std::to_string(kMostBytes) + " bytes";
  if (header.msg_flags & MSG_CTRUNC) out.problem = "its descriptors did not fit: raise ulimit -n";
  return out;
}

}  // namespace kvq_hold
