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

#include "daemon/rpc/checked_messages.h"
#include "daemon/rpc/session.h"

namespace kvq {
namespace {

constexpr unsigned kFdsPerMessage = 1;                 // 0 would drop outgoing descriptors too
constexpr std::uint64_t kMessageWords = 128 * 1024;    // 1 MiB: many times the largest request
constexpr std::size_t kCallWordsInFlight = 64 * 1024;  // of unanswered requests
constexpr std::size_t kUnreadReplies = 1024;   // replies that a peer has not fetched: it is not read until it has
constexpr std::size_t kUnreadBytes = 1 << 20;  // likewise
constexpr int kAcceptsPerTurn = 16;
// A storm of connections delays nobody's calls: past these in one window the backlog waits for the next.
constexpr std::uint64_t kAcceptWindowMs = 20;
constexpr std::uint32_t kAdmittedPerWindow = 16, kAcceptedPerWindow = 256;
constexpr std::uint32_t kRootReserve = 16;
constexpr std::uint64_t kSweepMs = 1000;       // at most; less when a deadline is short
constexpr std::uint64_t kAcceptPauseMs = 100;  // when descriptors have run out

capnp::ReaderOptions bounded_messages() {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = kMessageWords;
  options.nestingLimit = 32;
  return options;
}

struct Connection {
  Connection(kj::Own<kj::AsyncCapabilityStream> socket, wire::Node::Client node, std::shared_ptr<Process> owner,
             const Devices& devices)
      : process(std::move(owner)),
        last_owner_ms(devices.now_ms()),
        stream(kj::mv(socket), [&devices] { return devices.now_ms(); }),
        messages(stream, devices.options().max_questions_per_peer,
                 [this, &devices](const char* cause) {
                   process->lost = true;
                   devices.log_refusal(*process, cause);
                 }),
        network(messages, kFdsPerMessage, capnp::rpc::twoparty::Side::SERVER, bounded_messages()),
        system(capnp::makeRpcServer(network, kj::mv(node))) {
    system.setFlowLimit(kCallWordsInFlight);
    stream.set_ended([this] { process->lost = true; });
    stream.set_full([this] {
      return network.getCurrentQueueCount() >= kUnreadReplies || network.getCurrentQueueSize() >= kUnreadBytes;
    });
  }

  std::shared_ptr<Process> process;
  std::uint64_t last_owner_ms;  // when it was last seen to own a session or an Admin capability
  GatedStream stream;
  CheckedMessages messages;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> system;
};

class Server final : public RpcServer, private kj::TaskSet::ErrorHandler {
 public:
  Server(EventLoop& loop, kj::LowLevelAsyncIoProvider& io, std::vector<RpcPart> parts, int listening_fd)
      : loop_(loop),
        io_(io),
        listening_fd_(listening_fd),
        devices_(loop, std::move(parts)),
        options_(devices_.options()),
        admin_{devices_, loop.now_ms(), [this] { return connections_.size(); }},
        serving_(*this) {
    listen();
  }

  ~Server() noexcept override {}

  void deliver(const SlabNotice& notice, std::size_t part) override { devices_.at(part).sessions.deliver(notice); }
  void tick_soon(std::size_t part) override { devices_.at(part).sessions.ticker().soon(); }
  void leave() override { devices_.leave(); }
  kj::Promise<void> drained() override { return devices_.drained(); }
  std::size_t connections() const override { return connections_.size(); }
  std::size_t sessions() const override { return devices_.sessions(); }
  NodeReport report() const override {
    NodeReport out{.uptime_ms = loop_.now_ms() - admin_.started_ms,
                   .step_deadline_ms = options_.step_deadline_ms,
                   .connections = connections_.size(),
                   .devices = {}};
    for (const auto& device : devices_) out.devices.push_back(device->report());
    return out;
  }

 private:
  void listen() {
    accept_watch_ = loop_.on_readable(listening_fd_, [this] { accept_some(); });
  }

  void accept_some() {
    const std::uint64_t now_ms = loop_.now_ms();
    if (now_ms >= window_ends_ms_) {
      window_ends_ms_ = now_ms + kAcceptWindowMs;
      accepted_ = admitted_ = 0;
    }
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      if (admitted_ >= kAdmittedPerWindow || accepted_ >= kAcceptedPerWindow) return rest_for(kAcceptWindowMs);
      kj::AutoCloseFd socket(::accept4(listening_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.get() < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        // The backlog stays readable while there is no descriptor for it: look again later in place of spinning.
        options_.log(std::string("event=accept_failed action=pause error=\"") + std::strerror(errno) +
                     "\" fix=\"raise LimitNOFILE\"");
        return rest_for(kAcceptPauseMs);
      }
      ++accepted_;
      if (admit(kj::mv(socket))) ++admitted_;
    }
  }

  void rest_for(std::uint64_t ms) {
    accept_watch_.cancel();
    resume_watch_ = loop_.every(ms, [this] {
      resume_watch_.cancel();
      listen();
    });
  }

  // False: refused, or gone again. Who has no place is turned away before anything else is asked about it.
  bool admit(kj::AutoCloseFd socket) {
    ucred credentials{};
    socklen_t bytes = sizeof(credentials);
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return false;
    if (!has_place(credentials.uid)) {
      options_.log("event=connection_refused uid=" + std::to_string(credentials.uid) +
                   " pid=" + std::to_string(credentials.pid) + " connections=" + std::to_string(connections_.size()));
      return false;
    }
    auto peer = identify_peer(socket);
    if (!peer) return false;
    auto process = std::make_shared<Process>();
    process->peer = std::move(*peer);
    auto stream = io_.wrapUnixSocketFd(
        kj::mv(socket), kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC | kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK);
    auto connection = kj::heap<Connection>(kj::mv(stream), make_node(devices_, admin_, process), process, devices_);
    start(kj::mv(connection));
    return true;
  }

  void start(kj::Own<Connection> connection) {
    auto process = connection->process;
    auto cut = kj::newPromiseAndFulfiller<void>();
    auto fulfiller = std::make_shared<kj::Own<kj::PromiseFulfiller<void>>>(kj::mv(cut.fulfiller));
    process->cut = [fulfiller] { (*fulfiller)->fulfill(); };
    devices_.watch_end(process);
    Connection* raw_connection = connection.get();
    connections_.insert(raw_connection);
    arm_sweep();
    const auto note_lost = [process] { process->lost = true; };  // before its sessions close
    auto over = connection->network.onDisconnect()
                    .exclusiveJoin(kj::mv(cut.promise))
                    .then([note_lost] { note_lost(); },
                          [note_lost](kj::Exception&& exception) {
                            note_lost();
                            kj::throwRecoverableException(kj::mv(exception));
                          });
    auto farewell = kj::defer([this, raw_connection, process] {
      connections_.erase(raw_connection);
      process->cut = nullptr;
      devices_.hung_up(*process);
      arm_sweep();
    });
    // The connection goes first: with its capabilities its sessions close.
    serving_.add(over.attach(kj::mv(connection)).attach(kj::mv(farewell)));
  }

  bool has_place(uid_t uid) const {
    const std::size_t total = connections_.size();
    if (uid == 0) return total < options_.max_connections;
    const auto same = static_cast<std::size_t>(std::count_if(
        connections_.begin(), connections_.end(), [&](const Connection* c) { return c->process->peer.uid == uid; }));
    return total + kRootReserve < options_.max_connections && same < std::max(8u, options_.max_connections / 4);
  }

  // Cuts peers that do not read what they asked for, do not finish what they began, or want nothing. Runs only while
  // there are peers.
  void arm_sweep() {
    if (connections_.empty()) {
      sweep_watch_.cancel();
      sweeping_ = false;
    } else if (!sweeping_) {
      sweeping_ = true;
      sweep_watch_ = loop_.every(sweep_ms(), [this] { sweep(); });
    }
  }

  std::uint64_t sweep_ms() const {
    const std::uint64_t shortest_ms =
        std::min({options_.stalled_write_ms, options_.read_deadline_ms, options_.idle_ms});
    return std::clamp<std::uint64_t>(shortest_ms / 4, 1, kSweepMs);
  }

  void sweep() {
    const std::uint64_t now_ms = loop_.now_ms();
    for (Connection* c : connections_) {
      if (devices_.owned_by(*c->process) > 0 || c->process->admins > 0) c->last_owner_ms = now_ms;
      const auto waited_ms = c->network.getOutgoingMessageWaitTime() / kj::MILLISECONDS;
      const std::uint64_t since_ms = c->stream.since_ms();
      if (waited_ms >= options_.stalled_write_ms) {
        cut(*c, "replies_not_read", " queued_bytes=" + std::to_string(c->network.getCurrentQueueSize()));
      } else if (since_ms != 0 && now_ms - since_ms >= options_.read_deadline_ms) {
        cut(*c, "message_not_finished", " waited_ms=" + std::to_string(now_ms - since_ms));
      } else if (now_ms - c->last_owner_ms >= options_.idle_ms) {
        cut(*c, "idle", " idle_ms=" + std::to_string(now_ms - c->last_owner_ms));
      }
    }
  }

  void cut(const Connection& connection, const char* event, const std::string& details) {
    if (!connection.process->causes.insert(event).second) return;  // is being cut
    options_.log(std::string("event=") + event +
                 " action=disconnect pid=" + std::to_string(connection.process->peer.pid) +
                 " uid=" + std::to_string(connection.process->peer.uid) + details);
    connection.process->cut();
  }

  // A connection that breaks is over, however it broke; its sessions have been closed with it.
  void taskFailed(kj::Exception&&) override {}

  EventLoop& loop_;
  kj::LowLevelAsyncIoProvider& io_;
  const int listening_fd_;
  Devices devices_;
  const RpcOptions& options_;
  const AdminParts admin_;
  std::set<Connection*> connections_;
  bool sweeping_ = false;
  std::uint64_t window_ends_ms_ = 0;
  std::uint32_t accepted_ = 0, admitted_ = 0;  // in the window
  EventLoop::Watch accept_watch_, resume_watch_, sweep_watch_;
  kj::TaskSet serving_;  // last: connections end while everything they use still stands
};

}  // namespace

std::unique_ptr<RpcServer> serve(EventLoop& loop, kj::LowLevelAsyncIoProvider& io, std::vector<RpcPart> parts,
                                 int listening_fd) {
  return std::make_unique<Server>(loop, io, std::move(parts), listening_fd);
}

std::unique_ptr<RpcServer> serve(EventLoop& loop, kj::LowLevelAsyncIoProvider& io, Store& store, int listening_fd,
                                 RpcOptions options) {
  std::vector<RpcPart> parts;
  parts.push_back({store, std::move(options)});
  return serve(loop, io, std::move(parts), listening_fd);
}

}  // namespace kvq
