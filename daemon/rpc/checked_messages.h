// What a peer sends, looked at before Cap'n Proto acts on it.
//
// Invariant: a peer has at most `max_questions` calls that it has not finished, names at most a few capabilities in one
// message, and uses only the kinds of messages that kvq needs; what breaks this never reaches the RPC system. Its size
// and number of segments are bounded by Cap'n Proto before memory is taken for them.
#pragma once

#include <capnp/rpc.capnp.h>
#include <capnp/serialize-async.h>

#include <cstdint>
#include <functional>

#include "daemon/rpc/gated_stream.h"

namespace kvq {

class CheckedMessages final : public capnp::MessageStream {
 public:
  // `refused` gets the cause, one word, when a message is refused: the connection ends then.
  CheckedMessages(GatedStream& socket, std::uint32_t max_questions, std::function<void(const char* cause)> refused)
      : socket_(socket), messages_(socket), max_questions_(max_questions), refused_(std::move(refused)) {}

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(kj::ArrayPtr<kj::AutoCloseFd> fd_space,
                                                                    capnp::ReaderOptions options,
                                                                    kj::ArrayPtr<capnp::word> scratch) override;
  kj::Promise<void> writeMessage(kj::ArrayPtr<const int> fds,
                                 kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) override {
    return messages_.writeMessage(fds, segments);
  }
  kj::Promise<void> writeMessages(kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override {
    return messages_.writeMessages(messages);
  }
  kj::Maybe<int> getSendBufferSize() override { return messages_.getSendBufferSize(); }
  kj::Promise<void> end() override { return messages_.end(); }

 private:
  void check(capnp::rpc::Message::Reader message);
  void check_capabilities(capnp::List<capnp::rpc::CapDescriptor>::Reader capabilities);
  void require(bool allowed, const char* cause);

  GatedStream& socket_;
  capnp::AsyncCapabilityMessageStream messages_;
  const std::uint32_t max_questions_;
  std::uint32_t questions_ = 0;
  std::function<void(const char*)> refused_;
};

}  // namespace kvq
