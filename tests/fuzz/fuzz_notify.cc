// What names and carries descriptors: datagrams to kvq-hold's notify socket, and the environment that kvqd starts with.
//
// Invariant checked: each descriptor is held under a valid name or closed; a refusal has a reason; nothing else is
// kept.
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "daemon/intake.h"
#include "kvq/result.h"
#include "tests/fuzz/input.h"
#include "tools/kvq-hold/descriptor_store.h"
#include "tools/kvq-hold/notify_socket.h"

namespace kvq::testing {
namespace {

constexpr int kPassed = 5;  // descriptors 3 to 7 are what a service manager passes

std::size_t open_descriptors() {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

void put(int number, int fd) {
  KVQ_ASSERT(fd >= 0);
  if (fd == number) return;
  KVQ_ASSERT(::dup2(fd, number) == number);
  ::close(fd);
}

// Taken before main, so that the fuzzer's own files get other numbers.
const bool reserved = [] {
  for (int i = 0; i < kPassed; ++i) put(3 + i, ::eventfd(0, EFD_CLOEXEC));
  return true;
}();

struct Site {
  Site() {
    notify = std::make_unique<kvq_hold::NotifySocket>();
    sender = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, notify->address().c_str(), sizeof(address.sun_path) - 1);
    KVQ_ASSERT(::connect(sender, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  }
  std::unique_ptr<kvq_hold::NotifySocket> notify;
  int sender = -1;
};
Site& site() {
  static Site made;
  return made;
}

// Lines that mean something, whole or as bytes.
std::string words(FuzzInput& in, const std::vector<std::string>& known) {
  std::string out;
  for (std::uint32_t n = 1 + in.below(5); n > 0; --n) {
    const std::uint32_t which = in.below(static_cast<std::uint32_t>(known.size()) + 1);
    if (which < known.size()) {
      out += known[which];
    } else {
      std::string bytes(in.below(16), '\0');
      in.copy(bytes.data(), bytes.size());
      out += bytes;
    }
  }
  if (in.below(16) == 15) out.append(in.below(256) * 20, 'x');
  return out;
}

void send(const std::string& text, std::uint32_t fds) {
  int numbers[3];
  for (std::uint32_t i = 0; i < fds; ++i) numbers[i] = ::eventfd(0, EFD_CLOEXEC);
  iovec part{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(numbers))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fds > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds * sizeof(int));
    std::memcpy(CMSG_DATA(header), numbers, fds * sizeof(int));
  }
  KVQ_ASSERT(::sendmsg(site().sender, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()));
  for (std::uint32_t i = 0; i < fds; ++i) ::close(numbers[i]);
}

// The holder's part: takes what it may, closes the rest.
void notify(FuzzInput& in) {
  const std::size_t before = open_descriptors();
  {
    kvq_hold::DescriptorStore store(4);
    for (int messages = 0; !in.done() && messages < 12; ++messages) {
      const std::uint32_t fds = in.below(4);
      send(words(in, {"FDSTORE=1\n", "FDSTOREREMOVE=1\n", "READY=1\n", "FDNAME=kvq-root\n", "FDNAME=", "kvq-slab-1",
                      "FDPOLL=0\n", "\n", ":", std::string(1, '\0')}),
           fds);
      auto message = site().notify->receive();
      KVQ_ASSERT(message && message->fds.size() == fds && message->sender == ::getpid());
      if (!message->problem.empty()) {
        for (const int fd : message->fds) ::close(fd);
        continue;
      }
      KVQ_ASSERT(message->store == (fds > 0) && !(message->store && message->remove));
      const std::string& name = message->name;
      KVQ_ASSERT(!name.empty() && name.size() < 256 && name.find_first_of(": \n") == name.npos);
      if (message->remove) store.remove(name);
      for (const int fd : message->fds) (void)store.add(name, fd);
      KVQ_ASSERT(open_descriptors() == before + store.size());
    }
    KVQ_ASSERT(!site().notify->receive());
  }
  KVQ_ASSERT(open_descriptors() == before);
}

bool is_socket(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode);
}

// The daemon's part: names in the environment, in any form, for descriptors of any kind.
void intake(FuzzInput& in) {
  const std::size_t before = open_descriptors();
  const std::uint32_t sockets = in.below(32);
  for (int i = 0; i < kPassed; ++i) {
    put(3 + i, (sockets >> i & 1) != 0 ? ::socket(AF_UNIX, SOCK_STREAM, 0) : ::eventfd(0, 0));
  }
  std::string count = std::to_string(in.below(kPassed + 1));
  if (in.below(8) == 7) count = words(in, {"1", "-", "99999999999"});
  const auto read = std::strtoul(count.c_str(), nullptr, 0);
  if (read > kPassed && read < 1'000'000) count = "5";  // the numbers behind those passed are the fuzzer's
  ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
  ::setenv("LISTEN_FDS", count.c_str(), 1);
  ::setenv("LISTEN_FDNAMES",
           words(in, {":", "kvq-root", "kvq-slab-1", "kvqd.socket", "kvq-", "kvq-root:kvq-root", "\\", "\""}).c_str(),
           1);
  try {
    const Intake out = take_descriptors();
    for (const auto& [name, fd] : out.kept) KVQ_ASSERT(name.starts_with("kvq-") && !is_socket(fd.get()));
    KVQ_ASSERT(out.socket.get() < 0 || is_socket(out.socket.get()));
    KVQ_ASSERT(out.kept.size() + out.warnings.size() + (out.socket.get() >= 0) <= kPassed);
  } catch (const StartupError& error) {
    KVQ_ASSERT(error.code == ExitCode::usage && error.what()[0] != '\0');
  }
  KVQ_ASSERT(std::getenv("LISTEN_FDS") == nullptr);
  for (int i = 0; i < kPassed; ++i) put(3 + i, ::eventfd(0, EFD_CLOEXEC));
  KVQ_ASSERT(open_descriptors() == before);
}

}  // namespace
}  // namespace kvq::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvq::testing;
  site();
  FuzzInput in(data, size);
  in.below(4) == 3 ? intake(in) : notify(in);
  return 0;
}
