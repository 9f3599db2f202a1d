// Invariant: one descriptor at most per message is ever received (maxFdsPerMessage = 1), and each is closed once it is
// mapped.
#include "client/wire.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <unistd.h>

#include "client/last_error.h"

namespace kvq::client {
namespace {

constexpr kj::uint kFdsPerMessage = 1;

}  // namespace

kj::Promise<int> take_descriptor(wire::Memory::Client memory) {
  auto found = memory.getFd();
  return found.then([memory = kj::mv(memory)](kj::Maybe<int> fd) mutable -> int {
    KJ_IF_MAYBE (number, fd) {
      int copy;
      KJ_SYSCALL(copy = ::fcntl(*number, F_DUPFD_CLOEXEC, 3), "libkvq has no descriptor left");
      return copy;
    }
    KJ_FAIL_REQUIRE("kvqd sent no descriptor where one belongs");
  });
}

Reply reply_of(wire::Status::Reader status) {
  if (status.getCode() == 0) return {};
  return failure(static_cast<kvq_status>(status.getCode()), status.getMessage().cStr());
}

kj::Promise<void> SlabSinkServer::map(MapContext context) {
  return state_->in_order([state = state_, context]() mutable {
    return take_descriptor(context.getParams().getMemory()).then([state, context](int number) mutable {
      const Fd fd(number);
      if (state->memory == nullptr) return;  // the session has ended meanwhile: nothing to map, nothing to keep
      const auto params = context.getParams();
      const kvq_status mapped =
          state->memory->map_slab(state->session, SlabId{params.getSlab()}, fd.get(), params.getWritable());
      if (mapped == KVQ_OK) return;
      if (state->first_error.status == KVQ_OK) state->first_error = failure(mapped, last_error());
      KJ_FAIL_REQUIRE("a slab could not be mapped", last_error());
    });
  });
}

kj::Promise<void> SlabSinkServer::unmap(UnmapContext context) {
  return state_->in_order([state = state_, context]() mutable {
    if (state->memory != nullptr) state->memory->unmap_slab(state->session, SlabId{context.getParams().getSlab()});
  });
}

Connection::Wire::Wire(kj::Own<kj::AsyncCapabilityStream> stream_in, std::function<void()> broke)
    : stream(kj::mv(stream_in)),
      client(*stream, kFdsPerMessage),
      node(client.bootstrap().castAs<wire::Node>()),
      disconnected(client.onDisconnect()
                       .then([broke] { broke(); }, [broke](kj::Exception&&) { broke(); })
                       .eagerlyEvaluate(nullptr)) {}

}  // namespace kvq::client
