// Hostile peers of the daemon's socket: any bytes, any messages with any fields, descriptors, hang-ups, in any order,
// while another client is served and the daemon is restarted now and then.
//
// Invariant checked: the other client is answered, the store's sums hold, every session of a peer ends with its
// connection, and no descriptor is left over.
#include <kj/debug.h>

#include <cerrno>
#include <optional>

#include "tests/fuzz/input.h"
#include "tests/fuzz/rpc_messages.h"
#include "tests/fuzz/rpc_node.h"

// An operator may have a session's process killed: that would be the fuzzer. The linker sends the calls here.
extern "C" long __real_syscall(long number, long a, long b, long c, long d, long e, long f);
extern "C" long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (number != SYS_pidfd_send_signal) return __real_syscall(number, a, b, c, d, e, f);
  errno = EPERM;
  return -1;
}

namespace kvq::testing {
namespace {

class Peers {
 public:
  explicit Peers(FuzzInput& in) : in_(in), messages_(in) {
    messages_.token = [this](std::uint32_t session) { return node_.token(session); };
  }

  void run() {
    for (int moves = 0; !in_.done() && moves < 100; ++moves) move();
    for (auto& peer : peers_) peer.reset();
    site_.settle();
    node_.check_good();
    node_.end_good();
    node_.until([&] { return node_.server().connections() == 0 && node_.server().sessions() == 0; });
    node_.store().check_invariants();
  }

 private:
  std::optional<RawPeer>& place() { return peers_[at_ % std::size(peers_)]; }
  RawPeer& peer() {
    if (!place()) {
      place().emplace(site_.connect());
      place()->bootstrap(0);  // most of what follows needs it
      dialogs_[at_ % std::size(peers_)] = {};
    }
    return *place();
  }

  void move() {
    const auto what = in_.take<std::uint8_t>();
    at_ = what >> 6;
    switch (what & 0x1f) {
      case 0:
        return bytes();
      case 1:
        place().reset();
        break;
      case 2:
        peer().end_of_input();
        break;
      case 3:
        peer().take_replies();
        break;
      case 4:
        if (waits_++ < 6) site_.pass_ms(1 + in_.below(2));
        break;
      case 5:
        with_descriptor_ = true;
        return;
      case 6:
        node_.check_good();
        break;
      case 7:
        if (restarts_++ < 1) node_.restart();
        break;
      default:
        (void)peer();
        send(messages_.make(static_cast<MessageKind>(((what & 0x1f) - 8) % kMessageKinds),
                            dialogs_[at_ % std::size(peers_)]));
    }
    if ((what & 0x20) == 0) site_.settle();
  }

  void bytes() {
    kj::byte bytes[128] = {};
    const std::size_t size = in_.below(sizeof(bytes) + 1);
    in_.copy(bytes, size);
    send({bytes, bytes + size});
    site_.settle();
  }

  void send(std::vector<kj::byte> bytes) {
    if (bytes.empty()) return;
    const bool sent = std::exchange(with_descriptor_, false)
                          ? peer().send_with_descriptor(bytes.data(), bytes.size(), site_.listening)
                          : peer().send(bytes.data(), bytes.size());
    if (!sent) place().reset();  // the daemon has hung up: the next message opens a connection
  }

  FuzzInput& in_;
  RpcSite& site_ = rpc_site();
  RpcNode node_;
  HostileMessages messages_;
  std::optional<RawPeer> peers_[3];
  Dialog dialogs_[3];
  unsigned at_ = 0, waits_ = 0, restarts_ = 0;
  bool with_descriptor_ = false;
};

}  // namespace
}  // namespace kvq::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvq::testing;
  ::testing::GTEST_FLAG(break_on_failure) = true;
  static const bool warm = [] {  // what is made once is made: descriptors can be counted
    kj::_::Debug::setLogLevel(kj::LogSeverity::FATAL);
    FuzzInput nothing(nullptr, 0);
    Peers(nothing).run();
    return true;
  }();
  KVQ_ASSERT(warm);
  const std::size_t before = open_descriptors();
  {
    FuzzInput in(data, size);
    Peers(in).run();
  }
  KVQ_ASSERT(open_descriptors() == before);
  return 0;
}
