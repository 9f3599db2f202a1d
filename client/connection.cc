// Invariant: every public call runs one body on the loop thread; what it fills belongs to the caller, who sleeps
// meanwhile.
#include "client/connection.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <kj/io.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "client/last_error.h"
#include "client/wire.h"

namespace kvq::client {
namespace {

// How much longer than a deadline the library waits for the daemon's answer before it stops believing in it.
constexpr std::uint64_t kAnswerGraceMs = 500;
constexpr std::uint32_t kCallTimeoutMs = 5000;

kvq_status connect_error(const std::string& path, int error) {
  const char* p = path.c_str();
  switch (error) {
    case ENOENT:
      return fail(KVQ_ERR_NO_DAEMON, "no socket at %s; start kvqd, or set KVQ_SOCKET to its socket", p);
    case ECONNREFUSED:
      return fail(KVQ_ERR_NO_DAEMON, "nothing listens at %s; start kvqd (the socket file is stale)", p);
    case EACCES:
      return fail(KVQ_ERR_PERMISSION_DENIED, "no permission to connect to %s; join the socket's group (ls -l %s)", p,
                  p);
    case EAGAIN:
      return fail(KVQ_ERR_NO_DAEMON, "kvqd does not accept connections at %s; look at its log", p);
    default:
      return fail(KVQ_ERR_SYSTEM, "connecting to %s: %s", p, std::strerror(error));
  }
}

// A Unix socket connects at once or says why not; a full backlog (EAGAIN) is tried again until the deadline.
kvq_status connect_socket(const std::string& path, std::uint32_t deadline_ms, Fd& out) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "socket path of %zu bytes is too long (at most %zu): %s", path.size(),
                sizeof(address.sun_path) - 1, path.c_str());
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) return fail(KVQ_ERR_SYSTEM, "socket: %s", std::strerror(errno));
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN || std::chrono::steady_clock::now() >= until) return connect_error(path, errno);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  out = std::move(fd);
  return KVQ_OK;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Connection::Connection(std::string path, std::string label) : path_(std::move(path)), label_(std::move(label)) {}

kvq_status Connection::open(const std::string& socket_path, const std::string& label, std::uint32_t deadline_ms,
                            std::unique_ptr<Connection>& out) {
  Fd fd;
  if (auto s = connect_socket(socket_path, deadline_ms, fd); s != KVQ_OK) return s;
  std::unique_ptr<Connection> made(new Connection(socket_path, label));
  Connection& self = *made;
  const Reply timeout = failure(KVQ_ERR_NO_DAEMON, "kvqd at " + socket_path + " did not answer within " +
                                                       std::to_string(deadline_ms) + " ms; look at its log");
  const kvq_status status = self.loop_.run(
      [&self, &fd](kj::AsyncIoContext& io) -> kj::Promise<Reply> {
        kj::AutoCloseFd owned(fd.release());
        auto stream =
            io.lowLevelProvider->wrapUnixSocketFd(kj::mv(owned), kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK |
                                                                     kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC);
        self.wire_ = std::make_unique<Wire>(kj::mv(stream), [&self] { self.broke(); });
        return self.wire_->node.whenResolved().then([]() -> Reply { return {}; });
      },
      deadline_ms, timeout);
  if (status == KVQ_ERR_DAEMON_GONE)
    return fail(KVQ_ERR_NO_DAEMON, "%s hung up at once; look at kvqd's log", socket_path.c_str());
  if (status != KVQ_OK) return status;
  out = std::move(made);
  return KVQ_OK;
}

Connection::~Connection() {
  loop_.run(
      [this](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        wire_.reset();
        return Reply{};
      },
      kCallTimeoutMs, Reply{});
}

// Loop thread: the socket is closed. Whoever polls a notice descriptor learns it from there.
void Connection::broke() {
  gone_.store(true, std::memory_order_release);
  const std::uint64_t one = 1;
  for (Session::Wire* session : wire_->sessions) {
    [[maybe_unused]] const ssize_t written = ::write(session->notice_fd, &one, sizeof(one));  // full: readable already
  }
}

kvq_status Connection::say_gone() const {
  return fail(KVQ_ERR_DAEMON_GONE, "kvqd at %s is gone; close the model and connect again", path_.c_str());
}

kvq_status Connection::call(LoopThread::Body body, std::uint64_t timeout_ms, const char* what) {
  if (gone()) return say_gone();
  const Reply timeout =
      failure(KVQ_ERR_DAEMON_GONE, std::string("kvqd at ") + path_ + " did not answer " + what + " within " +
                                       std::to_string(timeout_ms) + " ms; look at its log");
  const kvq_status status = loop_.run(std::move(body), timeout_ms, timeout);
  return status == KVQ_ERR_DAEMON_GONE && gone() ? say_gone() : status;
}

kvq_status Connection::register_model(const RegisterRequest& request, Grant& grant, std::unique_ptr<Session>& session) {
  std::unique_ptr<Session::Wire> wire;
  const kvq_status status =
      call([&](kj::AsyncIoContext&) { return register_on_loop(*wire_, label_, request, grant, wire); },
           request.deadline_ms, "the registration");
  if (wire == nullptr) return status;
  auto made = std::make_unique<Session>(*this, std::move(wire));
  if (status == KVQ_OK) session = std::move(made);
  return status;  // a session that did not get ready is given up here, before its memory in `grant`
}

Connection::Session::Session(Connection& connection, std::unique_ptr<Wire> wire)
    : connection_(connection), wire_(std::move(wire)) {}

Connection::Session::~Session() {
  connection_.loop_.run(
      [this](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        // The slabs go first: once the daemon sees the session's end, it waits for no acknowledgement of it any more.
        wire_->sink->memory->forget_session(wire_->sink->session);
        wire_->sink->memory = nullptr;
        connection_.wire_->sessions.erase(wire_.get());
        wire_.reset();
        return Reply{};
      },
      kCallTimeoutMs, Reply{});
}

kvq_status Connection::Session::credits(std::uint32_t pages, std::uint32_t deadline_ms) {
  return connection_.call(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto call = wire_->session.creditsRequest();
        call.setPages(pages);
        call.setDeadlineMs(deadline_ms);
        return call.send().then([](auto&& response) { return reply_of(response.getStatus()); });
      },
      deadline_ms + kAnswerGraceMs, "a request for credits");
}

kvq_status Connection::Session::attach(const Attach& request, std::vector<PageId>& pages) {
  return connection_.call(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto call = wire_->session.attachRequest();
        call.setSequence(raw(request.sequence));
        call.setLastPage(raw(request.last.page));
        call.setGeneration(request.last.generation);
        call.setPages(request.pages);
        call.setKey(kj::arrayPtr(request.key.data(), request.key.size()));
        call.setFormatFloorDense(request.format_floor_dense);
        return call.send().then([&request, &pages](auto&& response) -> Reply {
          Reply reply = reply_of(response.getStatus());
          if (reply.status != KVQ_OK) return reply;
          const auto ids = response.getPages();
          if (ids.size() != request.pages) {
            return failure(KVQ_ERR_SYSTEM, "kvqd attached " + std::to_string(ids.size()) + " pages, asked for " +
                                               std::to_string(request.pages));
          }
          pages.clear();
          pages.reserve(ids.size());
          for (const std::uint32_t id : ids) pages.push_back(PageId{id});
          return {};
        });
      },
      kCallTimeoutMs, "an attach");
}

kvq_status Connection::Session::resume(SequenceId sequence, std::uint32_t deadline_ms) {
  return connection_.call(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto call = wire_->session.resumeRequest();
        call.setSequence(raw(sequence));
        call.setDeadlineMs(deadline_ms);
        return call.send().then([](auto&& response) { return reply_of(response.getStatus()); });
      },
      deadline_ms + kAnswerGraceMs, "a resume");
}

kvq_status Connection::Session::lost_pages(std::uint64_t since, LostPages& lost) {
  return connection_.call(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto call = wire_->session.lostPagesRequest();
        call.setSince(since);
        return call.send().then([&lost](auto&& response) -> Reply {
          Reply reply = reply_of(response.getStatus());
          if (reply.status != KVQ_OK) return reply;
          for (const std::uint32_t page : response.getPages()) lost.pages.push_back(page);
          for (const std::uint32_t sequence : response.getSequences()) lost.sequences.push_back(sequence);
          lost.now = response.getNow();
          return {};
        });
      },
      kCallTimeoutMs, "a question for lost pages");
}

kvq_status Connection::Session::ping() {
  return connection_.call(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        return wire_->session.pingRequest().send().then([](auto&&) -> Reply { return {}; });
      },
      kCallTimeoutMs, "a ping");
}

}  // namespace kvq::client
