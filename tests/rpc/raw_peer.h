// A peer that writes whatever bytes it likes to the daemon's socket.
//
// Invariant: nothing here speaks Cap'n Proto's protocol by itself: what is not sent by the test is not sent.
#pragma once

#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>

#include "tests/rpc/harness.h"

namespace kvq::testing {

class RawPeer {
 public:
  explicit RawPeer(const std::string& path) : RawPeer(connect_to(path)) {}
  explicit RawPeer(int connected_fd) : fd_(connected_fd) {}
  ~RawPeer() { ::close(fd_); }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // False when the daemon has hung up or its queue is full.
  bool send(const void* bytes, std::size_t size) {
    return ::send(fd_, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(size);
  }
  bool send(capnp::MessageBuilder& message) {
    const auto words = capnp::messageToFlatArray(message);
    return send(words.asBytes().begin(), words.asBytes().size());
  }
  bool send(const std::function<void(capnp::rpc::Message::Builder)>& fill) {
    capnp::MallocMessageBuilder message;
    fill(message.initRoot<capnp::rpc::Message>());
    return send(message);
  }
  bool send_with_descriptor(const void* bytes, std::size_t size, int descriptor) {
    iovec piece{const_cast<void*>(bytes), size};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    return ::sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(size);
  }
  // Takes what the daemon sent so far and throws it away; its size.
  std::size_t take_replies() {
    char bytes[4096];
    std::size_t all = 0;
    for (;;) {
      const ssize_t got = ::recv(fd_, bytes, sizeof(bytes), MSG_DONTWAIT);
      if (got <= 0) return all;
      all += static_cast<std::size_t>(got);
    }
  }
  void end_of_input() { EXPECT_EQ(::shutdown(fd_, SHUT_WR), 0); }

  // The least that makes the daemon's bootstrap capability the answer to `question`.
  bool bootstrap(std::uint32_t question) {
    return send([&](auto m) { m.initBootstrap().setQuestionId(question); });
  }
  // Both at once, so that a full queue takes neither.
  bool bootstrap_and_finish(std::uint32_t question) {
    std::vector<kj::byte> both;
    for (const bool first : {true, false}) {
      capnp::MallocMessageBuilder message;
      auto m = message.initRoot<capnp::rpc::Message>();
      first ? m.initBootstrap().setQuestionId(question) : m.initFinish().setQuestionId(question);
      const auto words = capnp::messageToFlatArray(message);
      both.insert(both.end(), words.asBytes().begin(), words.asBytes().end());
    }
    return send(both.data(), both.size());
  }
  bool finish(std::uint32_t question) {
    return send([&](auto m) { m.initFinish().setQuestionId(question); });
  }

 private:
  int fd_;
};

// A call of Node's `method` to what `bootstrap_question` brings.
inline capnp::rpc::Call::Builder init_call(capnp::rpc::Message::Builder m, std::uint32_t question,
                                           std::uint32_t bootstrap_question, std::uint16_t method) {
  auto call = m.initCall();
  call.setQuestionId(question);
  call.initTarget().initPromisedAnswer().setQuestionId(bootstrap_question);
  call.setInterfaceId(capnp::typeId<wire::Node>());
  call.setMethodId(method);
  return call;
}

// A whole registration as the wire has it; its sink is the peer's export 0.
inline void init_registration(
    capnp::rpc::Message::Builder m, std::uint32_t question,
    const std::function<void(wire::Registration::Builder)>& spoil = [](auto) {}) {
  auto call = init_call(m, question, /*bootstrap_question=*/0, /*method=*/0);
  auto payload = call.initParams();
  payload.initCapTable(1)[0].setSenderHosted(0);
  auto params = payload.getContent().initAs<wire::Node::RegisterParams>();
  auto r = params.initRequest();
  r.setContractVersion(kContractVersion);
  auto layers = r.initLayers(1);
  layers[0].setKvHeads(2);
  layers[0].setHeadDim(64);
  r.initFingerprint(32);
  r.setPageTokens(kPageTokens);
  r.setRole(wire::Role::CONTROL);
  spoil(r);
}

inline std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

}  // namespace kvq::testing
