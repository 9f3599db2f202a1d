// Invariant: as in wire.h of the client: Cap'n Proto objects live and die on the loop thread.
#include "tests/support/fake_daemon.h"

#include <capnp/rpc-twoparty.h>
#include <kj/async-unix.h>
#include <kj/debug.h>
#include <kj/io.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <list>
#include <set>

#include "client/last_error.h"
#include "kvq/protocol.capnp.h"
#include "tests/support/fake_memory.h"

namespace kvq::test {
namespace {

using client::Reply;

std::atomic<std::uint64_t> next_instance{0x5eed};  // no two share a mapping in one process

struct Session {
  Session(std::uint32_t number, std::uint32_t target)
      : id(number), credits(target), segment(number, FakeMemory::kTenant) {}
  const std::uint32_t id, credits;
  FakeSegment segment;
  bool waits = false;  // left by a dead daemon
  bool ended = false;
  std::uint32_t unmapped = 0;  // slabs that the client has not acknowledged
  kj::Maybe<wire::SlabSink::Client> sink;
  std::map<std::uint32_t, std::vector<std::uint32_t>> sequences;
  std::set<std::uint32_t> attached;  // sequences
};

class MemoryServer final : public wire::Memory::Server {
 public:
  explicit MemoryServer(int fd) : fd_(fd) {}
  kj::Maybe<int> getFd() override { return fd_; }

 private:
  int fd_;
};

}  // namespace

struct FakeDaemon::State final : kj::TaskSet::ErrorHandler {
  struct Peer {
    Peer(State& state, kj::Own<kj::AsyncCapabilityStream> stream_in, int socket, wire::Node::Client node)
        : fd(socket),
          stream(kj::mv(stream_in)),
          network(*stream, 1, capnp::rpc::twoparty::Side::SERVER),
          system(capnp::makeRpcServer(network, kj::mv(node))),
          closed(network.onDisconnect().then([this, &state] { state.peer_closed(*this); }).eagerlyEvaluate(nullptr)) {}
    const int fd;
    std::set<std::shared_ptr<Session>> sessions;
    kj::Own<kj::AsyncCapabilityStream> stream;
    capnp::TwoPartyVatNetwork network;
    capnp::RpcSystem<capnp::rpc::twoparty::VatId> system;
    kj::Promise<void> closed;
  };

  State(kj::AsyncIoContext& context, std::string path) : io(context), socket_path(std::move(path)), tasks(*this) {}
  void taskFailed(kj::Exception&&) override {}

  void start();
  void crash();
  void accept_more();
  void peer_closed(Peer& peer);
  void end(Session& session);
  void announce(const std::shared_ptr<Session>& session, std::uint32_t slab);
  kj::Promise<void> all_mapped(std::shared_ptr<Session> session);
  void drain(Session& session);
  void refill(Session& session, std::uint32_t pages);
  // Counts the call; true: the daemon dies here, or keeps silent.
  bool stops(const std::string& call, bool done = false);

  kj::AsyncIoContext& io;
  const std::string socket_path;
  FakeMemory memory;
  FakeGpu gpu;  // uuid empty: there is none
  Script script;
  Seen seen;
  const std::uint64_t instance = next_instance++;
  std::map<std::uint32_t, std::shared_ptr<Session>> sessions;
  std::uint32_t next_session = 1;
  kj::AutoCloseFd listening;
  kj::Own<kj::UnixEventPort::FdObserver> observer;
  std::list<kj::Own<Peer>> peers;
  bool up = false;
  std::uint32_t life = 0;  // starts so far
  kj::TaskSet tasks;
};

namespace {

using State = FakeDaemon::State;

// The call ends with its connection.
template <typename Context>
kj::Promise<void> silence(Context& context) {
  context.allowCancellation();
  return kj::NEVER_DONE;
}

class SessionServer final : public wire::Session::Server {
 public:
  SessionServer(State& state, std::shared_ptr<Session> session) : state_(state), session_(std::move(session)) {}
  ~SessionServer() noexcept(false) {
    if (!session_->waits) state_.end(*session_);
  }
  kj::Promise<void> directory(DirectoryContext c) override { return give("directory", c, state_.memory.directory.fd); }
  kj::Promise<void> prefixTable(PrefixTableContext c) override {
    return give("prefixTable", c, state_.memory.prefix.fd);
  }
  kj::Promise<void> segment(SegmentContext c) override { return give("segment", c, session_->segment.file.fd); }
  kj::Promise<void> doorbell(DoorbellContext c) override { return give("doorbell", c, session_->segment.doorbell); }
  kj::Promise<void> notice(NoticeContext c) override { return give("notice", c, session_->segment.notice); }

  kj::Promise<void> mirror(MirrorContext c) override { return give("mirror", c, state_.gpu.mirror_fd); }

  kj::Promise<void> ready(ReadyContext context) override {
    if (state_.stops("ready")) return silence(context);
    return state_.all_mapped(session_).then(
        [this, context]() mutable { return state_.stops("ready", true) ? silence(context) : kj::READY_NOW; });
  }
  kj::Promise<void> ping(PingContext context) override {
    return answer("ping", context, [] {});
  }
  kj::Promise<void> resume(ResumeContext context) override {
    return answer("resume", context, [] {});
  }
  kj::Promise<void> credits(CreditsContext context) override {
    return answer("credits", context, [&] { state_.refill(*session_, context.getParams().getPages()); });
  }
  kj::Promise<void> lostPages(LostPagesContext context) override {
    return answer("lostPages", context, [&] { context.getResults().setNow(context.getParams().getSince() + 1); });
  }
  kj::Promise<void> attach(AttachContext context) override {
    return answer("attach", context, [&] { attach(context.getParams(), context.getResults()); });
  }

 private:
  template <typename Context, typename Body>
  kj::Promise<void> answer(const char* call, Context context, Body body) {
    if (state_.stops(call)) return silence(context);
    state_.drain(*session_);
    body();
    if (state_.stops(call, true)) return silence(context);
    return kj::READY_NOW;
  }
  template <typename Context>
  kj::Promise<void> give(const char* call, Context context, int fd) {
    if (state_.stops(call)) return silence(context);
    context.getResults().setMemory(kj::heap<MemoryServer>(fd));
    return kj::READY_NOW;
  }
  template <typename Params, typename Results>
  void attach(Params params, Results results) {
    const std::uint32_t sequence = params.getSequence(), pages = params.getPages();
    if (session_->attached.count(sequence) != 0) ++state_.seen.attach_repeats;
    for (const auto& [number, other] : state_.sessions) {
      for (const auto& [id, chain] : other->sequences) {
        if (chain.size() < pages || chain[pages - 1] != params.getLastPage()) continue;
        const std::vector<std::uint32_t> held(chain.begin(), chain.begin() + pages);
        session_->sequences[sequence] = held;
        session_->attached.insert(sequence);
        auto list = results.initPages(pages);
        for (std::uint32_t i = 0; i < pages; ++i) list.set(i, held[i]);
        return;
      }
    }
    results.initStatus().setCode(static_cast<int>(Errc::stale_id));
  }

  State& state_;
  const std::shared_ptr<Session> session_;
};

class NodeServer final : public wire::Node::Server {
 public:
  explicit NodeServer(State& state) : state_(state) {}
  State::Peer* peer = nullptr;

  kj::Promise<void> register_(RegisterContext context) override {
    const auto request = context.getParams().getRequest();
    auto results = context.getResults();
    const bool resumes = request.getResumeSession() != 0;
    const char* call = resumes ? "reconnect" : "register";
    if (state_.stops(call)) return silence(context);
    std::shared_ptr<Session> session;
    if (!resumes) {
      const std::uint32_t id = state_.next_session++;
      session = state_.sessions[id] = std::make_shared<Session>(id, request.getCredits());
    } else if (Errc code = Errc::ok; (code = find(request, session)) != Errc::ok) {
      results.initStatus().setCode(static_cast<int>(code));
      results.getStatus().setMessage("no such session waits for its client");
      return kj::READY_NOW;
    }
    session->waits = false;
    state_.drain(*session);
    session->segment.words().daemon.credits_target.store(session->credits);
    state_.refill(*session, session->credits);
    peer->sessions.insert(session);
    if (request.hasSlabs()) {
      session->sink = request.getSlabs();
      const std::size_t slabs = state_.gpu.uuid.empty() ? state_.memory.slabs.size() : 1;
      for (std::uint32_t slab = 0; slab < slabs; ++slab) state_.announce(session, slab);
    }
    fill(results.initInfo(), *session, resumes);
    results.setSession(kj::heap<SessionServer>(state_, session));
    if (state_.stops(call, true)) return silence(context);
    return kj::READY_NOW;
  }

 private:
  Errc find(wire::Registration::Reader request, std::shared_ptr<Session>& out) {
    const auto found = state_.sessions.find(request.getResumeSession());
    if (state_.script.refuse != Errc::ok) return state_.script.refuse;
    if (found == state_.sessions.end() || !found->second->waits) return Errc::stale_id;
    const auto& token = found->second->segment.token;
    const auto sent = request.getResumeToken();
    if (!std::equal(sent.begin(), sent.end(), token.begin(), token.end())) {
      ++state_.seen.wrong_tokens;
      return Errc::permission_denied;
    }
    ++state_.seen.resumed;
    out = found->second;
    return Errc::ok;
  }
  void fill(wire::SessionInfo::Builder info, const Session& session, bool resumes) {
    const FakeDaemon::Script& script = state_.script;
    info.setSession(session.id + (resumes && script.other_session ? 1 : 0));
    info.setTenant(raw(FakeMemory::kTenant) + (resumes && script.other_tenant ? 1 : 0));
    info.setTenantName("fake");
    std::fill_n(info.initSalt(32).begin(), 32, kj::byte{3});
    const FakeGpu& gpu = state_.gpu;
    info.setArenaBytes(gpu.uuid.empty() ? kFakeArenaBytes : gpu.slab_bytes);
    info.setSlabBytes(gpu.uuid.empty() ? kFakeSlabBytes : gpu.slab_bytes);
    info.setDaemonInstance(state_.instance + (resumes && script.other_instance ? 1 : 0));
    info.setColdFormat(static_cast<std::uint8_t>(Format::int4));
    info.setDevice(gpu.uuid.empty() ? script.device : "cuda");
    info.setDeviceUuid(gpu.uuid.empty() ? script.uuid : gpu.uuid);
    info.setMirrorBytes(!gpu.uuid.empty()     ? gpu.mirror_bytes
                        : script.uuid.empty() ? 0
                                              : kFakeCapacity * sizeof(DirectoryEntry));
  }

  State& state_;
};

}  // namespace

bool FakeDaemon::State::stops(const std::string& call, bool done) {
  if (!done) ++seen.calls[call];
  if (!done && script.hold == call) {
    script.hold.clear();
    return true;
  }
  if (script.break_at != call || script.break_after != done) return false;
  script.break_at.clear();
  for (const auto& peer : peers) ::shutdown(peer->fd, SHUT_RDWR);
  tasks.add(kj::evalLater([this] { crash(); }));  // not inside a call of what goes
  if (script.back_after_ms != 0) {
    tasks.add(io.provider->getTimer().afterDelay(script.back_after_ms * kj::MILLISECONDS).then([this] { start(); }));
  }
  return true;
}

void FakeDaemon::State::start() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket_path.c_str(), sizeof(address.sun_path) - 1);
  ::unlink(address.sun_path);
  listening = kj::AutoCloseFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  KJ_REQUIRE(::bind(listening, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, errno);
  KJ_REQUIRE(::listen(listening, 64) == 0, errno);
  observer =
      kj::heap<kj::UnixEventPort::FdObserver>(io.unixEventPort, listening, kj::UnixEventPort::FdObserver::OBSERVE_READ);
  up = true;
  ++life;
  accept_more();
}

void FakeDaemon::State::accept_more() {
  for (;;) {
    const int fd = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) break;
    ++seen.connections;
    auto node = kj::heap<NodeServer>(*this);
    NodeServer& server = *node;
    auto stream =
        io.lowLevelProvider->wrapUnixSocketFd(kj::AutoCloseFd(fd), kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC |
                                                                       kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK);
    peers.push_back(kj::heap<Peer>(*this, kj::mv(stream), fd, kj::mv(node)));
    server.peer = peers.back().get();
  }
  tasks.add(observer->whenBecomesReadable().then([this, life = life] {
    if (up && life == this->life) accept_more();
  }));
}

void FakeDaemon::State::crash() {
  if (!up) return;
  up = false;
  for (const auto& peer : peers) ::shutdown(peer->fd, SHUT_RDWR);
  for (const auto& [id, session] : sessions) {
    session->waits = true;
    session->sink = nullptr;
    session->unmapped = 0;
  }
  peers.clear();
  observer = nullptr;
  listening = nullptr;
}

void FakeDaemon::State::peer_closed(Peer& peer) {
  if (!up) return;
  tasks.add(kj::evalLater([this, &peer] {
    const auto at = std::find_if(peers.begin(), peers.end(), [&](const auto& known) { return known.get() == &peer; });
    if (at == peers.end()) return;
    for (const auto& session : peer.sessions) {
      session->segment.words().daemon.revoked.store(1);
      end(*session);
    }
    peers.erase(at);
  }));
}

void FakeDaemon::State::end(Session& session) {
  if (session.ended) return;
  session.ended = true;
  session.sink = nullptr;
  sessions.erase(session.id);
}

void FakeDaemon::State::announce(const std::shared_ptr<Session>& session, std::uint32_t slab) {
  KJ_IF_MAYBE (sink, session->sink) {
    auto call = sink->mapRequest();
    call.setSlab(slab);
    call.setWritable(gpu.writable);
    call.setMemory(kj::heap<MemoryServer>(gpu.uuid.empty() ? memory.slabs[slab]->fd : gpu.slab_fd));
    call.setSerial(slab + 1);
    ++session->unmapped;
    tasks.add(call.send().then([session](auto&&) { session->unmapped -= session->unmapped == 0 ? 0 : 1; }));
  }
}

kj::Promise<void> FakeDaemon::State::all_mapped(std::shared_ptr<Session> session) {
  if (session->unmapped == 0) return kj::READY_NOW;
  return io.provider->getTimer().afterDelay(kj::MILLISECONDS).then([this, session] { return all_mapped(session); });
}

void FakeDaemon::State::drain(Session& session) {
  auto& ring = session.segment.words().commands;
  for (std::uint64_t at = ring.consumed.load(); at != ring.produced.load(std::memory_order_acquire); ++at) {
    const Command c = ring.item[at % kCommandSlots];
    if (c.kind == CommandKind::return_credit) memory.give_back(raw(c.page));
    if (c.sequence == SequenceId{0}) {
      ring.consumed.store(at + 1, std::memory_order_release);
      continue;
    }
    auto& pages = session.sequences[raw(c.sequence)];
    if (c.kind == CommandKind::take) pages.push_back(raw(c.page));
    if (c.kind == CommandKind::seal && (c.flags & kPrivate) == 0) {
      Key key{};
      std::copy(std::begin(c.key), std::end(c.key), key.begin());
      memory.seal(raw(c.page), key);
    }
    if (c.kind == CommandKind::release) {
      if (session.attached.erase(raw(c.sequence)) == 0) {
        for (const std::uint32_t page : pages) memory.give_back(page);
      }
      session.sequences.erase(raw(c.sequence));
    }
    ring.consumed.store(at + 1, std::memory_order_release);
  }
}

void FakeDaemon::State::refill(Session& session, std::uint32_t pages) {
  auto& ring = session.segment.words().magazine;
  while (ring.produced.load() - ring.consumed.load(std::memory_order_acquire) < pages) {
    const std::uint64_t at = ring.produced.load();
    ring.item[at % kMagazineSlots] = memory.take();
    ring.produced.store(at + 1, std::memory_order_release);
  }
}

template <typename Body>
void FakeDaemon::on_loop(Body body) {
  const kvq_status done = loop_.run(
      [&](kj::AsyncIoContext& io) -> kj::Promise<Reply> {
        body(io);
        return Reply{};
      },
      20'000, {KVQ_ERR_SYSTEM, "the fake daemon hangs"});
  if (done != KVQ_OK) throw std::runtime_error(client::last_error());
}

FakeDaemon::FakeDaemon(const FakeGpu* gpu) {
  char pattern[] = "/tmp/kvq-fake-XXXXXX";
  if (::mkdtemp(pattern) == nullptr) throw std::runtime_error("mkdtemp");
  directory_ = pattern;
  socket_ = directory_ + "/kvqd.sock";
  on_loop([&](kj::AsyncIoContext& io) {
    state_ = std::make_unique<State>(io, socket_);
    if (gpu != nullptr) {
      state_->gpu = *gpu;
      state_->memory.move_to(gpu->slab_bytes, gpu->publish);
    }
    state_->start();
  });
}

FakeDaemon::~FakeDaemon() {
  on_loop([&](kj::AsyncIoContext&) {
    state_->crash();
    state_.reset();
  });
  std::filesystem::remove_all(directory_);
}

void FakeDaemon::crash() {
  on_loop([&](kj::AsyncIoContext&) { state_->crash(); });
}
void FakeDaemon::start() {
  on_loop([&](kj::AsyncIoContext&) { state_->start(); });
}
void FakeDaemon::cut() {
  on_loop([&](kj::AsyncIoContext&) {
    for (const auto& peer : state_->peers) ::shutdown(peer->fd, SHUT_RDWR);
  });
}
void FakeDaemon::add_slab() {
  loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        state_->memory.add_slab();
        auto mapped = kj::heapArrayBuilder<kj::Promise<void>>(state_->sessions.size());
        for (const auto& [id, session] : state_->sessions) {
          state_->announce(session, static_cast<std::uint32_t>(state_->memory.slabs.size() - 1));
          mapped.add(state_->all_mapped(session));
        }
        return kj::joinPromises(mapped.finish()).then([] { return Reply{}; });
      },
      20'000, {KVQ_ERR_SYSTEM, "the slab is not mapped"});
}
void FakeDaemon::set(const Script& script) {
  on_loop([&](kj::AsyncIoContext&) { state_->script = script; });
}
FakeDaemon::Seen FakeDaemon::seen() {
  Seen seen;
  on_loop([&](kj::AsyncIoContext&) {
    seen = state_->seen;
    seen.sessions = static_cast<std::uint32_t>(state_->sessions.size());
    for (const auto& [id, session] : state_->sessions) {
      seen.sequences += static_cast<std::uint32_t>(session->sequences.size());
    }
  });
  return seen;
}

}  // namespace kvq::test
