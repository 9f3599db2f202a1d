// Invariant: one descriptor at most per message is ever received (maxFdsPerMessage = 1), and each is closed once it is
// mapped.
#include "client/wire.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <unistd.h>

#include "client/last_error.h"
#include "kvq/kill_point.h"

namespace kvq::client {

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

namespace {

void not_mapped(SinkState& state, kvq_status why) {
  if (state.first_error.status == KVQ_OK) state.first_error = failure(why, last_error());
  KJ_FAIL_REQUIRE("a slab could not be mapped", last_error());
}

kj::Promise<void> when_over(std::shared_ptr<TenantMemory> memory, std::vector<TenantMemory::OpenStep> steps,
                            kj::Timer& timer) {
  if (memory->all_over(steps)) return kj::READY_NOW;
  return timer.afterDelay(kj::MILLISECONDS).then([memory, steps = std::move(steps), &timer]() mutable {
    return when_over(std::move(memory), std::move(steps), timer);
  });
}

}  // namespace

kj::Promise<void> SlabSinkServer::map(MapContext context) {
  return in_order([state = state_, link = link_, context]() mutable -> kj::Promise<void> {
    return take_descriptor(context.getParams().getMemory()).then([state, link, context](int number) mutable {
      const Fd fd(number);
      // The session has ended meanwhile, or the socket: nothing to map, nothing to keep.
      if (state->memory == nullptr || state->link != link) return;
      const auto params = context.getParams();
      const kvq_status mapped = state->memory->map_slab(state->session, SlabId{params.getSlab()}, fd.get(),
                                                        params.getSerial(), params.getWritable());
      if (mapped == KVQ_OK) return kill_point(KillPoint::client_slab_mapped);
      not_mapped(*state, mapped);
    });
  });
}

kj::Promise<void> SlabSinkServer::unmap(UnmapContext context) {
  return in_order([state = state_, link = link_, context, &timer = timer_]() mutable -> kj::Promise<void> {
    if (state->memory == nullptr || state->link != link) return kj::READY_NOW;
    return when_over(state->memory, state->memory->open_steps(), timer).then([state, link, context]() mutable {
      if (state->memory == nullptr || state->link != link) return;
      state->memory->unmap_slab(state->session, SlabId{context.getParams().getSlab()});
    });
  });
}

Connection::Session::Wire::Wire(wire::Session::Client session_in, std::shared_ptr<SinkState> sink_in,
                                const RegisterRequest& request_in)
    : session(kj::mv(session_in)),
      sink(std::move(sink_in)),
      request(request_in),
      end_pair(kj::newPromiseAndFulfiller<void>()),
      when_ended(kj::mv(end_pair.promise).fork()) {}

void Connection::Session::Wire::ring() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(notice_fd, &one, sizeof(one));  // full: readable already
}

}  // namespace kvq::client
