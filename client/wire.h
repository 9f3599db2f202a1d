// The Cap'n Proto side of a connection: objects that live on the loop thread only.
//
// Invariant: a SlabSink answers the daemon only after the slab is mapped (or unmapped) here; calls that come before the
// reply to a registration or a resume wait for it, since only the reply says where slabs go. A slab is unmapped when
// the steps are over that ran on the GPU when kvqd asked for it.
#pragma once

#include <kj/async-io.h>

#include <memory>
#include <string>

#include "client/connection.h"
#include "kvq/protocol.capnp.h"
#include "kvq/segment.h"

namespace kvq::client {

// Shared by a session's Wire and its sinks; a sink may outlive both by the time that a release takes to arrive.
struct SinkState {
  std::shared_ptr<TenantMemory> memory;  // null before the reply and after the session has ended
  SessionId session{};
  std::uint64_t link = 0;  // number of the peer whose sink maps; what comes from an earlier one is void
  Reply first_error;       // of a mapping that failed
};

class SlabSinkServer final : public wire::SlabSink::Server {
 public:
  // Calls wait for `accepted`, which comes when `state` is set.
  SlabSinkServer(std::shared_ptr<SinkState> state, std::uint64_t link, kj::Promise<void> accepted, kj::Timer& timer)
      : state_(std::move(state)), link_(link), timer_(timer), last_(kj::mv(accepted)) {}
  kj::Promise<void> map(MapContext context) override;
  kj::Promise<void> unmap(UnmapContext context) override;

 private:
  template <typename Body>
  kj::Promise<void> in_order(Body body) {
    auto done = last_.then(kj::mv(body)).fork();
    last_ = done.addBranch().catch_([](kj::Exception&&) {});
    return done.addBranch();
  }

  const std::shared_ptr<SinkState> state_;
  const std::uint64_t link_;
  kj::Timer& timer_;        // the loop's
  kj::Promise<void> last_;  // of the calls so far: each waits for the one before, whatever became of it
};

struct Connection::Session::Wire {
  Wire(wire::Session::Client session, std::shared_ptr<SinkState> sink, const RegisterRequest& request);
  void ring() const;  // its notice

  wire::Session::Client session;  // of the daemon of now, while `live`
  const std::shared_ptr<SinkState> sink;
  const std::shared_ptr<SessionState> state = std::make_shared<SessionState>();
  const RegisterRequest request;       // as it was registered: a resume repeats it
  std::uint8_t token[16] = {};         // proves to the next daemon that this is the session's process
  const DaemonWords* words = nullptr;  // of the segment, which outlives the Wire, as the notice does
  int notice_fd = -1;
  bool live = true;
  bool ended = false;
  kj::PromiseFulfillerPair<void> end_pair;
  kj::ForkedPromise<void> when_ended;
};

// Registers a model: fills `grant` and `wire`, adds it to the link and resolves once every slab is mapped
// (registration.cc). What was made before a failure is given up again.
kj::Promise<Reply> register_on_loop(Link& link, const RegisterRequest& request, Grant& grant,
                                    std::shared_ptr<Connection::Session::Wire>& wire);

// What the daemon says to a session of an earlier one: why not, or its capability.
struct Resumed {
  std::string why_not;
  wire::Session::Client session = nullptr;
};
// `accepted` lets the new sink's calls through. Rejects when the daemon did not answer.
kj::Promise<Resumed> resume_on_loop(Link& link, Connection::Session::Wire& session, kj::Promise<void> accepted);

// Reply of a wire status.
Reply reply_of(wire::Status::Reader status);

// A duplicate of the capability's descriptor; rejects when it carries none.
kj::Promise<int> take_descriptor(wire::Memory::Client memory);

}  // namespace kvq::client
