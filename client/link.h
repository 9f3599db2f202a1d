// The link to kvqd: one socket after the other, for as long as the client lives. When one breaks, the loop thread
// connects again by itself and resumes every session on the new one.
//
// Invariant: loop thread only. A session may call the daemon while it is `live`: its capability belongs to the peer of
// now, and that daemon has said that it is the same session of the same memory. A session that was refused once is lost
// for good. With no daemon there, the link costs one attempt to connect in each half second.
#pragma once

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <functional>
#include <memory>
#include <set>
#include <string>

#include "client/connection.h"
#include "client/wire.h"

namespace kvq::client {

// A connected socket in `out`, or errno: a Unix socket connects at once or says why not.
int connect_once(const std::string& path, Fd& out);

class Link {
 public:
  using SessionWire = std::shared_ptr<Connection::Session::Wire>;
  // Sends a call; `left_ms` is what is left of the caller's deadline.
  using Attempt = std::function<kj::Promise<Reply>(std::uint32_t left_ms)>;

  Link(kj::AsyncIoContext& io, std::string path, std::string label);
  ~Link();
  KJ_DISALLOW_COPY(Link);

  // Talks to the daemon behind `socket`; resolves once it has answered.
  kj::Promise<void> start(Fd socket);

  // Makes the attempt once the session (null: any daemon) may be called, and again when the socket breaks meanwhile;
  // the link may be away for `deadline_ms` at most. `attempt` outlives the promise.
  kj::Promise<Reply> call(SessionWire session, std::uint32_t deadline_ms, const Attempt& attempt);

  wire::Node::Client& node() { return peer_->node; }
  kj::Timer& timer() { return io_.provider->getTimer(); }
  const std::string& label() const { return label_; }
  std::uint64_t number() const { return number_; }  // of the peer: sockets so far
  void add(SessionWire session) { sessions_.insert(kj::mv(session)); }
  void remove(const SessionWire& session) { sessions_.erase(session); }

 private:
  struct Waiting;
  kj::Promise<Reply> go_on(std::shared_ptr<Waiting> waiting);
  kj::Promise<void> meet(Fd socket);
  void came_up();
  void went_down();
  void try_later();
  kj::Promise<void> try_now();
  void resume(const SessionWire& session);
  void resumed(Connection::Session::Wire& session, wire::Session::Client capability);
  void lose(Connection::Session::Wire& session, const std::string& why);
  void settled();
  void announce();
  kj::Promise<void> changed() { return changed_promise_.addBranch(); }
  Reply say_away(std::uint32_t deadline_ms) const;

  struct Peer {
    explicit Peer(kj::Own<kj::AsyncCapabilityStream> stream_in);
    kj::Own<kj::AsyncCapabilityStream> stream;
    capnp::TwoPartyClient client;
    wire::Node::Client node;
  };
  class ErrorHandler final : public kj::TaskSet::ErrorHandler {
   public:
    void taskFailed(kj::Exception&&) override {}  // each task reports to whom it concerns before it could fail
  };

  kj::AsyncIoContext& io_;
  const std::string path_, label_;
  std::unique_ptr<Peer> peer_;  // also while it has not answered yet
  bool up_ = false;             // it has answered
  std::uint64_t number_ = 0;
  std::uint32_t unsettled_ = 0;  // sessions whose resume is not answered
  std::uint32_t backoff_ms_;
  int connect_errno_ = 0;  // why the last attempt failed
  std::set<SessionWire> sessions_;
  kj::Own<kj::PromiseFulfiller<void>> changed_fulfiller_;  // renewed at every change of a session's or the link's state
  kj::ForkedPromise<void> changed_promise_;
  ErrorHandler ignore_;
  kj::TaskSet tasks_;  // last: its tasks use the rest
};

}  // namespace kvq::client
