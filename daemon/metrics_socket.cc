// A Unix socket is ListenSocket's business; a port is bound here.
#include "daemon/metrics_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace kvq {
namespace {

constexpr int kBacklog = 16;

const char* fix_of(int error) {
  switch (error) {
    case EADDRINUSE:
      return "stop what listens there (ss -ltnp shows it), or choose another port";
    case EACCES:
      return "ports below 1024 need a privilege: choose one above";
    case EAFNOSUPPORT:
    case EADDRNOTAVAIL:
    case EPERM:
      return "no such loopback here: under systemd install the drop-in kvqd-metrics.conf, or use \"unix:/PATH\"";
    default:
      return "choose another address";
  }
}

int bind_loopback(const MetricsSocketOptions& options) {
  const bool six = options.host == "::1";
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(options.port);
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(options.port);
  v6.sin6_addr = in6addr_loopback;
  const int fd = ::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int yes = 1;  // a kvqd that follows another binds at once
  const auto* address = six ? reinterpret_cast<const sockaddr*>(&v6) : reinterpret_cast<const sockaddr*>(&v4);
  if (fd >= 0 && ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
      ::bind(fd, address, six ? sizeof v6 : sizeof v4) == 0 && ::listen(fd, kBacklog) == 0) {
    return fd;
  }
  const int error = errno;
  if (fd >= 0) ::close(fd);
  const std::string host = six ? "[::1]" : options.host;
  throw StartupError(ExitCode::environment, "metrics on " + host + ":" + std::to_string(options.port) + ": " +
                                                std::strerror(error) + "; " + fix_of(error));
}

}  // namespace

MetricsSocket::MetricsSocket(const MetricsSocketOptions& options) {
  if (options.path.empty()) {
    tcp_ = bind_loopback(options);
  } else {
    unix_ = std::make_unique<ListenSocket>(ListenOptions{
        .path = options.path, .group = options.group, .option = "--metrics", .group_setting = "admin_group"});
  }
}

MetricsSocket::~MetricsSocket() {
  if (tcp_ >= 0) ::close(tcp_);
}

}  // namespace kvq
