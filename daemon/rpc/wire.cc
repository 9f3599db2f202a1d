// Conversions to the wire.
#include "daemon/rpc/wire.h"

#include <fcntl.h>

#include <cstring>

namespace kvq {
namespace {

class MemoryServer final : public wire::Memory::Server {
 public:
  explicit MemoryServer(SharedFd fd) : fd_(std::move(fd)) {}
  kj::Maybe<int> getFd() override {
    if (fd_->get() < 0) return nullptr;
    return fd_->get();
  }

 private:
  SharedFd fd_;
};

}  // namespace

SharedFd duplicate(int fd) { return std::make_shared<kj::AutoCloseFd>(::fcntl(fd, F_DUPFD_CLOEXEC, 3)); }

wire::Memory::Client make_memory(SharedFd fd) { return kj::heap<MemoryServer>(std::move(fd)); }

void set_status(wire::Status::Builder status, Errc code, std::string_view message, int native) {
  status.setCode(static_cast<int>(code));
  status.setMessage(kj::str(kj::ArrayPtr<const char>(message.data(), message.size())));
  status.setNative(native);
}

void set_status(wire::Status::Builder status, const Error& error) {
  set_status(status, error.code, describe(error), error.native);
}

std::string describe(const Error& error) {
  std::string text = error.context;
  if (error.native != 0) text += std::string(" (") + std::strerror(error.native) + ")";
  return text;
}

std::string printable(std::string_view text, std::size_t limit) {
  std::string out(text.substr(0, limit));
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e || c == '"' || c == '\\') c = '?';
  }
  return out;
}

}  // namespace kvq
