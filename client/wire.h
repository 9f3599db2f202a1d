// The Cap'n Proto side of a connection: objects that live on the loop thread only.
//
// Invariant: a SlabSink answers the daemon only after the slab is mapped (or unmapped) here; calls that come before the
// registration's reply wait for it, since only the reply says where slabs go.
#pragma once

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <memory>
#include <set>
#include <string>

#include "client/connection.h"
#include "kvq/protocol.capnp.h"

namespace kvq::client {

// Shared by a session's Wire and its sink; the sink may outlive the session by the time that a release takes to arrive.
struct SinkState {
  SinkState() : pair(kj::newPromiseAndFulfiller<void>()), last(kj::mv(pair.promise)) {}
  std::shared_ptr<TenantMemory> memory;  // null before the reply and after the session has ended
  SessionId session{};
  Reply first_error;                    // of a mapping that failed
  kj::PromiseFulfillerPair<void> pair;  // fulfilled once `memory` and `session` are set
  kj::Promise<void> last;               // of the calls so far: each waits for the one before, whatever became of it

  template <typename Body>
  kj::Promise<void> in_order(Body body) {
    auto done = last.then(kj::mv(body)).fork();
    last = done.addBranch().catch_([](kj::Exception&&) {});
    return done.addBranch();
  }
};

class SlabSinkServer final : public wire::SlabSink::Server {
 public:
  explicit SlabSinkServer(std::shared_ptr<SinkState> state) : state_(std::move(state)) {}
  kj::Promise<void> map(MapContext context) override;
  kj::Promise<void> unmap(UnmapContext context) override;

 private:
  std::shared_ptr<SinkState> state_;
};

struct Connection::Session::Wire {
  wire::Session::Client session;
  std::shared_ptr<SinkState> sink;
  int notice_fd = -1;  // rung when the connection breaks; the model owns it and outlives the Wire
};

struct Connection::Wire {
  Wire(kj::Own<kj::AsyncCapabilityStream> stream_in, std::function<void()> broke);
  kj::Own<kj::AsyncCapabilityStream> stream;
  capnp::TwoPartyClient client;
  wire::Node::Client node;
  std::set<Session::Wire*> sessions;
  kj::Promise<void> disconnected;
};

// Registers a model: fills `grant` and `wire` and resolves once every slab is mapped (registration.cc).
kj::Promise<Reply> register_on_loop(Connection::Wire& connection, const std::string& label,
                                    const RegisterRequest& request, Grant& grant,
                                    std::unique_ptr<Connection::Session::Wire>& wire);

// Reply of a wire status.
Reply reply_of(wire::Status::Reader status);

// A duplicate of the capability's descriptor; rejects when it carries none.
kj::Promise<int> take_descriptor(wire::Memory::Client memory);

}  // namespace kvq::client
