// Invariant: nothing here waits: a step of coming back is a task of the loop that starts the next one when it is over.
#include "client/link.h"

#include <kj/debug.h>
#include <kj/io.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kvq/kill_point.h"

namespace kvq::client {
namespace {

constexpr std::uint32_t kFirstBackoffMs = 5, kLongestBackoffMs = 500;
constexpr kj::uint kFdsPerMessage = 1;

kj::ForkedPromise<void> fork_of(kj::PromiseFulfillerPair<void>& pair) { return kj::mv(pair.promise).fork(); }

}  // namespace

int connect_once(const std::string& path, Fd& out) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return ENAMETOOLONG;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) return errno;
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno != EINTR) return errno;
  }
  out = std::move(fd);
  return 0;
}

Link::Peer::Peer(kj::Own<kj::AsyncCapabilityStream> stream_in)
    : stream(kj::mv(stream_in)), client(*stream, kFdsPerMessage), node(client.bootstrap().castAs<wire::Node>()) {}

Link::Link(kj::AsyncIoContext& io, std::string path, std::string label)
    : io_(io),
      path_(std::move(path)),
      label_(std::move(label)),
      backoff_ms_(kFirstBackoffMs),
      changed_promise_(nullptr),
      tasks_(ignore_) {
  announce();
}

Link::~Link() = default;

void Link::announce() {
  auto fulfiller = kj::mv(changed_fulfiller_);
  auto pair = kj::newPromiseAndFulfiller<void>();
  changed_promise_ = fork_of(pair);
  changed_fulfiller_ = kj::mv(pair.fulfiller);
  if (fulfiller.get() != nullptr) fulfiller->fulfill();
}

kj::Promise<void> Link::meet(Fd socket) {
  constexpr auto kFlags = kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK | kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC;
  ++number_;
  peer_ = std::make_unique<Peer>(io_.lowLevelProvider->wrapUnixSocketFd(kj::AutoCloseFd(socket.release()), kFlags));
  auto broken = peer_->client.onDisconnect().then(
      []() -> kj::Promise<void> { return KJ_EXCEPTION(DISCONNECTED, "kvqd hung up at once"); });
  return peer_->node.whenResolved().exclusiveJoin(kj::mv(broken));
}

kj::Promise<void> Link::start(Fd socket) {
  return meet(kj::mv(socket)).then([this] { came_up(); });
}

// The peer has answered: watches its socket and resumes what an earlier one had.
void Link::came_up() {
  up_ = true;
  connect_errno_ = 0;
  if (number_ > 1) kill_point(KillPoint::client_reconnected);
  tasks_.add(peer_->client.onDisconnect().catch_([](kj::Exception&&) {}).then([this] {
    tasks_.add(kj::evalLater([this] { went_down(); }));  // not inside a callback of the peer that goes
  }));
  unsettled_ = 1;
  for (const SessionWire& session : std::set<SessionWire>(sessions_)) resume(session);
  settled();
  announce();
}

void Link::went_down() {
  up_ = false;
  peer_ = nullptr;
  for (const SessionWire& session : sessions_) {
    session->live = false;
    session->session = nullptr;
    if (session->state->is_lost()) continue;
    const auto& memory = session->sink->memory;
    if (memory != nullptr && memory->ends_with_daemon()) {  // the sooner its user knows, the sooner the memory is free
      lose(*session, "the connection broke, and this GPU's memory ends with kvqd");
      continue;
    }
    session->state->away.store(true, std::memory_order_release);
    session->ring();
  }
  announce();
  try_later();
}

void Link::try_later() {
  const auto wait = backoff_ms_ * kj::MILLISECONDS;
  backoff_ms_ = std::min(2 * backoff_ms_, kLongestBackoffMs);
  tasks_.add(io_.provider->getTimer()
                 .afterDelay(wait)
                 .then([this] { return try_now(); })
                 .then([this] { came_up(); },
                       [this](kj::Exception&&) {
                         peer_ = nullptr;
                         try_later();
                       }));
}

kj::Promise<void> Link::try_now() {
  Fd socket;
  connect_errno_ = connect_once(path_, socket);
  if (connect_errno_ != 0) return KJ_EXCEPTION(DISCONNECTED, "no daemon yet");
  return meet(kj::mv(socket));
}

// Once every session is resumed or lost, the next break starts again with a short wait; a daemon that dies at each
// resume is asked ever more seldom.
void Link::settled() {
  if (--unsettled_ == 0) backoff_ms_ = kFirstBackoffMs;
}

void Link::resume(const SessionWire& session) {
  if (session->state->is_lost()) return;
  ++unsettled_;
  auto gate = kj::newPromiseAndFulfiller<void>();
  tasks_.add(resume_on_loop(*this, *session, kj::mv(gate.promise))
                 .then(
                     [this, session, number = number_, gate = kj::mv(gate.fulfiller)](Resumed&& reply) mutable {
                       if (number != number_ || !up_) return;
                       settled();
                       if (session->ended) return;  // the capability goes, and with it the daemon's session
                       if (!reply.why_not.empty()) return lose(*session, reply.why_not);
                       session->sink->link = number;
                       gate->fulfill();
                       resumed(*session, kj::mv(reply.session));
                     },
                     [this, session, number = number_](kj::Exception&& exception) {
                       if (number != number_ || !up_ || exception.getType() == kj::Exception::Type::DISCONNECTED)
                         return;
                       settled();
                       if (session->ended) return;  // nothing of it is there any more, the notice included
                       lose(*session, exception.getDescription().cStr());
                     }));
}

void Link::resumed(Connection::Session::Wire& session, wire::Session::Client capability) {
  session.session = kj::mv(capability);
  session.live = true;
  session.state->reconnects.fetch_add(1, std::memory_order_relaxed);
  session.state->away.store(false, std::memory_order_release);
  kill_point(KillPoint::client_resumed);
  session.ring();
  announce();
}

void Link::lose(Connection::Session::Wire& session, const std::string& why) {
  session.state->lose(path_, why, session.words->revoked.load(std::memory_order_relaxed) != 0);
  session.ring();
  announce();
}

struct Link::Waiting {
  SessionWire session;
  std::uint32_t deadline_ms;
  kj::TimePoint until;
  const Attempt& attempt;
  std::uint64_t failed_on = 0;  // number of the peer whose socket broke under the last attempt
};

kj::Promise<Reply> Link::call(SessionWire session, std::uint32_t deadline_ms, const Attempt& attempt) {
  const auto until = io_.provider->getTimer().now() + deadline_ms * kj::MILLISECONDS;
  auto waiting = std::make_shared<Waiting>(Waiting{session, deadline_ms, until, attempt});
  if (session == nullptr) return go_on(kj::mv(waiting));
  auto ended = session->when_ended.addBranch().then(
      [] { return failure(KVQ_ERR_STALE_ID, "the model was closed while this call waited; release the handle"); });
  return ended.exclusiveJoin(go_on(kj::mv(waiting)));
}

kj::Promise<Reply> Link::go_on(std::shared_ptr<Waiting> waiting) {
  Waiting& w = *waiting;
  kj::Timer& timer = io_.provider->getTimer();
  if (w.session != nullptr && w.session->state->is_lost()) {
    return failure(KVQ_ERR_DAEMON_GONE, w.session->state->lost_text());
  }
  const kj::TimePoint now = timer.now();
  const bool ready = up_ && w.failed_on != number_ && (w.session == nullptr || w.session->live);
  if (ready) {
    const auto left_ms = now < w.until ? static_cast<std::uint32_t>((w.until - now) / kj::MILLISECONDS) : 0;
    return kj::evalNow([&] { return w.attempt(left_ms); })
        .catch_([this, waiting, number = number_](kj::Exception&& exception) -> kj::Promise<Reply> {
          if (exception.getType() != kj::Exception::Type::DISCONNECTED) return kj::mv(exception);
          waiting->failed_on = number;
          return go_on(waiting);
        });
  }
  if (now >= w.until) return say_away(w.deadline_ms);
  return changed().exclusiveJoin(timer.atTime(w.until)).then([this, waiting] { return go_on(waiting); });
}

Reply Link::say_away(std::uint32_t deadline_ms) const {
  if (up_ && unsettled_ == 0) {  // the daemon itself says that the connection is over, but it is not
    return failure(KVQ_ERR_DAEMON_GONE, "kvqd at " + path_ + " broke off this call; look at its log");
  }
  std::string text = "kvqd at " + path_ + " is restarting and did not come back within " + std::to_string(deadline_ms) +
                     " ms; call again later, or look at its log";
  if (connect_errno_ != 0) text += std::string(" (connecting: ") + std::strerror(connect_errno_) + ")";
  return failure(KVQ_ERR_DAEMON_GONE, text);
}

}  // namespace kvq::client
