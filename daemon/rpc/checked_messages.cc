// One look at each message: kind, capabilities, unfinished calls.
#include "daemon/rpc/checked_messages.h"

#include <kj/debug.h>

namespace kvq {
namespace {

namespace rpc = capnp::rpc;

constexpr unsigned kCapabilitiesPerMessage = 4;  // a registration brings one

}  // namespace

kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> CheckedMessages::tryReadMessage(kj::ArrayPtr<kj::AutoCloseFd>,
                                                                                   capnp::ReaderOptions options,
                                                                                   kj::ArrayPtr<capnp::word> scratch) {
  return messages_.tryReadMessage(nullptr, options, scratch)
      .then([this](kj::Maybe<capnp::MessageReaderAndFds>&& message) -> kj::Maybe<capnp::MessageReaderAndFds> {
        socket_.message_over();
        KJ_IF_MAYBE (got, message) {
          check(got->reader->getRoot<rpc::Message>());
        }
        return kj::mv(message);
      });
}

// An allow list: what is new to this daemon is refused, too. A call that was not asked for its results here, a promise
// or a capability of a third party would make the RPC system keep what no kvq client needs.
void CheckedMessages::check(rpc::Message::Reader message) {
  switch (message.which()) {
    case rpc::Message::CALL: {
      const auto call = message.getCall();
      require(call.getSendResultsTo().isCaller(), "results_elsewhere");
      check_capabilities(call.getParams().getCapTable());
      require(++questions_ <= max_questions_, "unfinished_calls");
      return;
    }
    case rpc::Message::BOOTSTRAP:
      require(++questions_ <= max_questions_, "unfinished_calls");
      return;
    case rpc::Message::FINISH:  // of a question that is none: the RPC system ends the connection
      if (questions_ > 0) --questions_;
      return;
    case rpc::Message::RETURN: {
      const auto result = message.getReturn();
      require(result.isResults() || result.isException() || result.isCanceled(), "results_elsewhere");
      if (result.isResults()) check_capabilities(result.getResults().getCapTable());
      return;
    }
    case rpc::Message::RELEASE:
    case rpc::Message::ABORT:
    case rpc::Message::UNIMPLEMENTED:
      return;
    default:
      require(false, "message_kind");
  }
}

void CheckedMessages::check_capabilities(capnp::List<rpc::CapDescriptor>::Reader capabilities) {
  require(capabilities.size() <= kCapabilitiesPerMessage, "capabilities");
  for (const auto capability : capabilities) {
    require(capability.isNone() || capability.isSenderHosted(), "capability_kind");
  }
}

void CheckedMessages::require(bool allowed, const char* cause) {
  if (allowed) return;
  refused_(cause);
  kj::throwFatalException(KJ_EXCEPTION(FAILED, "kvqd refuses this message", cause));
}

}  // namespace kvq
