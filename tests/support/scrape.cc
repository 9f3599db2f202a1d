// A few lines of HTTP/1.1: the reply ends with its Content-Length.
#include "tests/support/scrape.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace kvq::test {
namespace {

constexpr const char* kUnix = "unix:";

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

}  // namespace

int connect_metrics(const std::string& address) {
  const bool local = address.starts_with(kUnix);
  const int fd = ::socket(local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval minute{60, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &minute, sizeof(minute));
  int status = -1;
  if (local) {
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::strncpy(to.sun_path, address.c_str() + std::strlen(kUnix), sizeof(to.sun_path) - 1);
    status = ::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to));
  } else {
    const sockaddr_in to = loopback(static_cast<std::uint16_t>(std::stoul(address)));
    status = ::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to));
  }
  if (status == 0) return fd;
  const std::string why = std::strerror(errno);
  ::close(fd);
  throw std::runtime_error("connect " + address + ": " + why);
}

std::string free_port() {
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof(address);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool bound = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  ::close(fd);
  if (!bound) throw std::runtime_error("no free port");
  return std::to_string(ntohs(address.sin_port));
}

HttpReply http_get(const std::string& address, const std::string& target, const std::string& method) {
  const int fd = connect_metrics(address);
  const std::string request = method + " " + target + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  std::string text;
  if (::send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
    char some[1 << 16];
    for (;;) {
      const ssize_t got = ::recv(fd, some, sizeof(some), 0);
      if (got <= 0) break;
      text.append(some, static_cast<std::size_t>(got));
      const auto blank = text.find("\r\n\r\n"), length = text.find("Content-Length: ");
      if (blank == std::string::npos || length > blank || method == "HEAD") continue;
      if (text.size() >= blank + 4 + std::stoul(text.substr(length + 16))) break;
    }
  }
  ::close(fd);
  const auto blank = text.find("\r\n\r\n");
  if (!text.starts_with("HTTP/1.1 ") || blank == std::string::npos) throw std::runtime_error("no reply: " + text);
  return {std::stoi(text.substr(9, 3)), text.substr(0, blank), text.substr(blank + 4)};
}

Samples parse_samples(const std::string& text) {
  Samples out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# ")) continue;
    const auto space = line.rfind(' ');
    if (space == std::string::npos) throw std::runtime_error("no sample: " + line);
    std::size_t used = 0;
    const double value = std::stod(line.substr(space + 1), &used);
    if (used != line.size() - space - 1) throw std::runtime_error("no number: " + line);
    if (!out.emplace(line.substr(0, space), value).second) throw std::runtime_error("twice: " + line);
  }
  return out;
}

Samples scrape(const std::string& address) {
  const HttpReply reply = http_get(address);
  if (reply.status != 200) throw std::runtime_error("status " + std::to_string(reply.status) + ": " + reply.body);
  return parse_samples(reply.body);
}

Samples moved(const Samples& before, const Samples& after) {
  Samples out;
  for (const auto& [name, value] : after) {
    const std::string family = name.substr(0, name.find('{'));
    if (!family.ends_with("_total") && !family.ends_with("_count")) continue;
    if (family == "kvq_ticks_total" || family == "kvq_step_seconds_count") continue;
    const auto found = before.find(name);
    const double delta = value - (found == before.end() ? 0 : found->second);
    if (delta != 0) out.emplace(name, delta);
  }
  return out;
}

double sum_of(const Samples& samples, const std::string& family, const std::string& part) {
  double sum = 0;
  for (const auto& [name, value] : samples) {
    if (name.substr(0, name.find('{')) == family && name.find(part) != std::string::npos) sum += value;
  }
  return sum;
}

}  // namespace kvq::test
