// A whole daemon and one client that behaves, in the fuzzer's process: real store, server, loop and sockets.
//
// Invariant: everything but the loop and the listening socket is made anew for each input; nothing is left over but
// those two.
#pragma once

#include <sys/syscall.h>

#include "tests/rpc/raw_peer.h"
#include "tests/support/store_node.h"

namespace kvq::testing {

// Made once: kernel objects that cost time and carry no state of an input.
struct RpcSite {
  RpcSite() {
    sockaddr_un any{};
    any.sun_family = AF_UNIX;
    listening = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    // No path: the kernel picks an abstract name, so that a crash leaves no file.
    KVQ_ASSERT(::bind(listening, reinterpret_cast<const sockaddr*>(&any), sizeof(any.sun_family)) == 0);
    KVQ_ASSERT(::listen(listening, 16) == 0);
    length = sizeof(name);
    KVQ_ASSERT(::getsockname(listening, reinterpret_cast<sockaddr*>(&name), &length) == 0);
  }
  int connect() const {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    KVQ_ASSERT(::connect(fd, reinterpret_cast<const sockaddr*>(&name), length) == 0);
    return fd;
  }
  // All that can happen without time going by.
  void settle() { io.waitScope.poll(); }
  void pass_ms(unsigned ms) { io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(io.waitScope); }

  kj::AsyncIoContext io = kj::setupAsyncIo();
  EventLoop loop{io};
  int listening = -1;
  sockaddr_un name{};
  socklen_t length = 0;
};
inline RpcSite& rpc_site() {
  static RpcSite& site = *new RpcSite;
  return site;
}

class RpcNode {
 public:
  static constexpr std::uint32_t kSlabs = 6;

  RpcNode() {
    store_ = Store::create(
        config(), *device_, deliver(), [](const std::string&) {}, &keeper_);
    serve_now();
    connect_good();
    const auto response = register_good([](auto) {});
    KVQ_ASSERT(response.getStatus().getCode() == 0);
    good_id_ = response.getInfo().getSession();
  }
  ~RpcNode() {
    good_session_ = nullptr;
    good_ = nullptr;
    server_.reset();
    site_.settle();
  }

  Store& store() { return *store_; }
  RpcServer& server() { return *server_; }
  std::uint32_t good_id() const { return good_id_; }

  // The token of a session as its client finds it; zeros when there is no such session.
  SessionToken token(std::uint32_t session) const {
    SessionToken token{};
    for (const SessionStatus& s : store_->sessions()) {
      if (raw(s.id) != session) continue;
      KVQ_ASSERT(::pread(store_->memory(s.id).segment, token.data(), token.size(), offsetof(SegmentHeader, token)) ==
                 static_cast<ssize_t>(token.size()));
    }
    return token;
  }

  // The daemon ends, the next one adopts, and the good client comes back.
  void restart() {
    good_session_ = nullptr;
    good_ = nullptr;
    server_->leave();
    server_.reset();
    site_.settle();
    store_.reset();
    device_ = make_device();
    Kept kept = keeper_.hand_over();
    std::string why;
    auto adopted = Store::adopt(
        config(), *device_, deliver(), [](const std::string&) {}, keeper_, kept, why, site_.loop.now_ms());
    KVQ_ASSERT(adopted);
    store_ = std::move(*adopted);
    serve_now(&kept);
    connect_good();
    const SessionToken known = token(good_id_);
    const auto response = register_good([&](wire::Registration::Builder r) {
      r.setResumeSession(good_id_);
      r.setResumeToken(kj::arrayPtr(known.data(), known.size()));
    });
    KVQ_ASSERT(response.getStatus().getCode() == 0 || good_was_ended());
  }

  // It is served, unless an operator has ended it.
  void check_good() {
    store_->check_invariants();
    if (good_was_ended()) return;
    auto& session = KJ_ASSERT_NONNULL(good_session_);
    wait(kj::Promise<capnp::Response<wire::Session::PingResults>>(session.pingRequest().send()));
    wait(kj::Promise<capnp::Response<wire::Session::SegmentResults>>(session.segmentRequest().send()));
  }

  void end_good() {
    good_session_ = nullptr;
    good_ = nullptr;
  }
  template <typename Condition>
  void until(Condition condition) {
    for (int i = 0; !condition(); ++i) {
      KVQ_ASSERT(i < 2000);
      server_->tick_soon();
      site_.pass_ms(1);
    }
  }

 private:
  static StoreConfig config() {
    StoreConfig c = StoreNode::small();
    c.max_sessions = 48;  // more than one process may have
    return c;
  }
  static std::unique_ptr<Device> make_device() {
    return make_host_device(kSlabs * StoreNode::kSlabBytes, StoreNode::kSlabBytes, run_inline(),
                            2 * kSlabs * StoreNode::kSlabBytes);
  }
  Store::DeliverNotice deliver() {
    return [this](const SlabNotice& notice) {
      if (server_ != nullptr) server_->deliver(notice);
    };
  }

  void serve_now(Kept* kept = nullptr) {
    RpcOptions options;
    options.unlisted = TenantSpec{};
    options.make_salt = [] { return std::array<std::uint8_t, 32>{1, 2, 3}; };
    options.admin_uids = {::getuid()};
    options.range_bytes = 2 * kSlabs * StoreNode::kSlabBytes;
    options.slab_bytes = StoreNode::kSlabBytes;
    options.device = "host";
    options.max_sessions_per_peer = 8;
    options.max_questions_per_peer = 32;
    options.max_parked_per_session = 4;
    options.reconnect_ms = 300;  // a peer that is gone for good is waited for within until()
    options.keeper = &keeper_;
    options.kept = kept;
    options.log = [this](const std::string& line) {
      const std::string evicted = "event=session_evicted session=" + std::to_string(good_id_) + " ";
      if (line.compare(0, evicted.size(), evicted) == 0) good_evicted_ = true;
    };
    server_ = serve(site_.loop, *site_.io.lowLevelProvider, *store_, site_.listening, std::move(options));
  }

  void connect_good() {
    good_ = kj::heap<GoodClient>(
        site_.io.lowLevelProvider->wrapUnixSocketFd(site_.connect(), kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP));
  }
  template <typename Spoil>
  capnp::Response<wire::Node::RegisterResults> register_good(Spoil spoil) {
    auto request = good_->node.registerRequest();
    fill(request.initRequest(), kj::heap<Sink>(seen_));
    auto registration = request.getRequest();
    registration.initLayers(1)[0].setKvHeads(1);
    registration.getLayers()[0].setHeadDim(64);
    registration.setCredits(0);
    spoil(registration);
    auto response = wait(kj::Promise<capnp::Response<wire::Node::RegisterResults>>(request.send()));
    if (response.getStatus().getCode() == 0) good_session_ = response.getSession();
    return response;
  }

  bool good_was_ended() const { return good_evicted_; }

  template <typename T>
  T wait(kj::Promise<T> promise) {
    auto late = site_.io.provider->getTimer().afterDelay(5 * kj::SECONDS).then([]() -> kj::Promise<T> {
      return KJ_EXCEPTION(FAILED, "the client that behaves is not answered");
    });
    return promise.exclusiveJoin(kj::mv(late)).wait(site_.io.waitScope);
  }

  struct GoodClient {
    explicit GoodClient(kj::Own<kj::AsyncCapabilityStream> socket)
        : stream(kj::mv(socket)), rpc(*stream, /*maxFdsPerMessage=*/1), node(rpc.bootstrap().castAs<wire::Node>()) {}
    kj::Own<kj::AsyncCapabilityStream> stream;
    capnp::TwoPartyClient rpc;
    wire::Node::Client node;
  };

  RpcSite& site_ = rpc_site();
  std::unique_ptr<Device> device_ = make_device();
  MapKeeper keeper_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<RpcServer> server_;
  Sink::Seen seen_;
  kj::Own<GoodClient> good_;
  kj::Maybe<wire::Session::Client> good_session_;
  std::uint32_t good_id_ = 0;
  bool good_evicted_ = false;
};

}  // namespace kvq::testing
