// Accepts peers, one bootstrap object each, and joins the parts of the rpc room.
//
// Invariant: nothing a peer sends, or leaves unsent, costs the daemon more than one connection's bounded memory:
// connections are counted per uid, messages and calls in flight are limited, unread replies end the connection, and the
// last few connections are kept for root, so that kvqctl always gets an answer.
#include <capnp/rpc-twoparty.h>
#include <kj/debug.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "daemon/rpc/gated_stream.h"
#include "daemon/rpc/session.h"

namespace kvq {
namespace {

constexpr unsigned kFdsPerMessage = 1;                 // 0 would drop outgoing descriptors too
constexpr std::uint64_t kMessageWords = 128 * 1024;    // 1 MiB: many times the largest request
constexpr std::size_t kCallWordsInFlight = 64 * 1024;  // of unanswered requests
constexpr std::size_t kUnreadReplies = 1024;   // replies that a peer has not fetched: it is not read until it has
constexpr std::size_t kUnreadBytes = 1 << 20;  // likewise
constexpr int kAcceptsPerTurn = 16;
constexpr std::uint32_t kRootReserve = 16;
constexpr std::uint64_t kSweepMs = 1000;
constexpr std::uint64_t kAcceptPauseMs = 100;  // when descriptors have run out

capnp::ReaderOptions bounded_messages() {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = kMessageWords;
  options.nestingLimit = 32;
  return options;
}

struct Connection {
  Connection(kj::Own<kj::AsyncCapabilityStream> socket, wire::Node::Client node, std::shared_ptr<Process> owner)
      : process(std::move(owner)),
        stream(kj::mv(socket)),
        network(stream, kFdsPerMessage, capnp::rpc::twoparty::Side::SERVER, bounded_messages()),
        system(capnp::makeRpcServer(network, kj::mv(node))) {
    system.setFlowLimit(kCallWordsInFlight);
    stream.set_full([this] {
      return network.getCurrentQueueCount() >= kUnreadReplies || network.getCurrentQueueSize() >= kUnreadBytes;
    });
  }

  std::shared_ptr<Process> process;
  GatedStream stream;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> system;
};

class Server final : public RpcServer, private kj::TaskSet::ErrorHandler {
 public:
  Server(EventLoop& loop, kj::LowLevelAsyncIoProvider& io, Store& store, int listening_fd, RpcOptions options)
      : loop_(loop),
        io_(io),
        listening_fd_(listening_fd),
        options_(std::move(options)),
        sessions_(loop, store, options_),
        tenants_(store, options_),
        admin_{sessions_, loop.now_ms(), [this] { return connections_.size(); }},
        serving_(*this) {
    listen();
  }

  ~Server() noexcept override {}

  void deliver(const SlabNotice& notice) override { sessions_.deliver(notice); }
  void tick_soon() override { sessions_.ticker().soon(); }
  kj::Promise<void> drained() override { return sessions_.drained(); }
  std::size_t connections() const override { return connections_.size(); }
  std::size_t sessions() const override { return sessions_.size(); }

 private:
  void listen() {
    accept_watch_ = loop_.on_readable(listening_fd_, [this] { accept_some(); });
  }

  void accept_some() {
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      kj::AutoCloseFd socket(::accept4(listening_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        pause_accepting();
        return;
      }
      admit(kj::mv(socket));
    }
  }

  // The backlog stays readable while there is no descriptor for it: look again later in place of spinning.
  void pause_accepting() {
    options_.log(std::string("event=accept_failed action=pause error=\"") + std::strerror(errno) +
                 "\" fix=\"raise LimitNOFILE\"");
    accept_watch_.cancel();
    resume_watch_ = loop_.every(kAcceptPauseMs, [this] {
      resume_watch_.cancel();
      listen();
    });
  }

  void admit(kj::AutoCloseFd socket) {
    auto peer = identify_peer(socket);
    if (!peer) return;  // gone again
    if (!has_place(peer->uid)) {
      options_.log("event=connection_refused uid=" + std::to_string(peer->uid) + " pid=" + std::to_string(peer->pid) +
                   " connections=" + std::to_string(connections_.size()));
      return;
    }
    auto process = std::make_shared<Process>();
    process->peer = std::move(*peer);
    auto stream = io_.wrapUnixSocketFd(
        kj::mv(socket), kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC | kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK);
    auto connection = kj::heap<Connection>(kj::mv(stream), make_node(sessions_, tenants_, admin_, process), process);
    start(kj::mv(connection));
  }

  void start(kj::Own<Connection> connection) {
    auto process = connection->process;
    auto cut = kj::newPromiseAndFulfiller<void>();
    auto fulfiller = std::make_shared<kj::Own<kj::PromiseFulfiller<void>>>(kj::mv(cut.fulfiller));
    process->cut = [fulfiller] { (*fulfiller)->fulfill(); };
    process->ended_watch = loop_.on_readable(process->peer.pidfd, [this, weak = std::weak_ptr<Process>(process)] {
      if (auto p = weak.lock()) ended(*p);
    });
    Connection* raw_connection = connection.get();
    connections_.insert(raw_connection);
    arm_sweep();
    auto over = connection->network.onDisconnect().exclusiveJoin(kj::mv(cut.promise));
    auto farewell = kj::defer([this, raw_connection, process] {
      connections_.erase(raw_connection);
      process->cut = nullptr;
      sessions_.hung_up(*process);
      arm_sweep();
    });
    // The connection goes first: with its capabilities its sessions close.
    serving_.add(over.attach(kj::mv(connection)).attach(kj::mv(farewell)));
  }

  // What it held is reusable from here on. A forked child may hold the socket open: that is cut.
  void ended(Process& process) {
    process.ended_watch.cancel();
    process.ended = true;
    sessions_.process_ended(process);
    if (process.cut) process.cut();
  }

  bool has_place(uid_t uid) const {
    const std::size_t total = connections_.size();
    if (uid == 0) return total < options_.max_connections;
    const auto same = static_cast<std::size_t>(std::count_if(
        connections_.begin(), connections_.end(), [&](const Connection* c) { return c->process->peer.uid == uid; }));
    return total + kRootReserve < options_.max_connections && same < std::max(8u, options_.max_connections / 4);
  }

  // Cuts peers that do not read what they asked for. Runs only while there are peers.
  void arm_sweep() {
    if (connections_.empty()) {
      sweep_watch_.cancel();
      sweeping_ = false;
    } else if (!sweeping_) {
      sweeping_ = true;
      sweep_watch_ = loop_.every(kSweepMs, [this] { sweep(); });
    }
  }

  void sweep() {
    for (Connection* c : connections_) {
      const auto waited_ms = c->network.getOutgoingMessageWaitTime() / kj::MILLISECONDS;
      if (waited_ms < options_.stalled_write_ms) continue;
      options_.log("event=replies_not_read action=disconnect pid=" + std::to_string(c->process->peer.pid) +
                   " queued_bytes=" + std::to_string(c->network.getCurrentQueueSize()));
      c->process->cut();
    }
  }

  // A connection that breaks is over, however it broke; its sessions have been closed with it.
  void taskFailed(kj::Exception&&) override {}

  EventLoop& loop_;
  kj::LowLevelAsyncIoProvider& io_;
  const int listening_fd_;
  const RpcOptions options_;
  Sessions sessions_;
  TenantChooser tenants_;
  const AdminParts admin_;
  std::set<Connection*> connections_;
  bool sweeping_ = false;
  EventLoop::Watch accept_watch_, resume_watch_, sweep_watch_;
  kj::TaskSet serving_;  // last: connections end while everything they use still stands
};

}  // namespace

std::unique_ptr<RpcServer> serve(EventLoop& loop, kj::LowLevelAsyncIoProvider& io, Store& store, int listening_fd,
                                 RpcOptions options) {
  return std::make_unique<Server>(loop, io, store, listening_fd, std::move(options));
}

}  // namespace kvq
