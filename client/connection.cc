// Invariant: every public call runs one body on the loop thread; what it fills belongs to the caller, who sleeps
// meanwhile.
#include "client/connection.h"

#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "client/device.h"
#include "client/last_error.h"
#include "client/link.h"
#include "client/wire.h"
#include "kvq/kill_point.h"

namespace kvq::client {
namespace {

// How much longer than a deadline the library waits for the daemon's answer before it stops believing in it.
constexpr std::uint64_t kAnswerGraceMs = 500;
constexpr std::uint32_t kCallMs = 5000;  // for calls without a deadline of their own

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
    case ENAMETOOLONG:
      return fail(KVQ_ERR_INVALID_ARGUMENT, "socket path of %zu bytes is too long (at most %zu): %s", path.size(),
                  sizeof(sockaddr_un::sun_path) - 1, p);
    case EAGAIN:
      return fail(KVQ_ERR_NO_DAEMON, "kvqd does not accept connections at %s; look at its log", p);
    default:
      return fail(KVQ_ERR_SYSTEM, "connecting to %s: %s", p, std::strerror(error));
  }
}

// A full backlog (EAGAIN) is tried again until the deadline.
kvq_status connect_socket(const std::string& path, std::uint32_t deadline_ms, Fd& out) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  for (;;) {
    const int error = connect_once(path, out);
    if (error == 0) return KVQ_OK;
    if (error != EAGAIN || std::chrono::steady_clock::now() >= until) return connect_error(path, error);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

void SessionState::lose(const std::string& socket_path, const std::string& why, bool revoked) {
  lost_text_ = revoked ? "kvqd let this session go, since its connection broke: close the model and register again"
                       : "kvqd started anew: close the model and register again";
  lost_text_ += " (" + socket_path + ": " + why + ")";
  lost_.store(true, std::memory_order_release);
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
        self.link_ = std::make_unique<Link>(io, self.path_, self.label_);
        return self.link_->start(std::move(fd)).then([]() -> Reply { return {}; });
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
        link_.reset();
        return Reply{};
      },
      kCallMs, Reply{});
}

kvq_status Connection::call(Session* session, std::uint32_t deadline_ms, const char* what, const Attempt& attempt) {
  const std::uint64_t timeout_ms = deadline_ms + kAnswerGraceMs;
  const Reply timeout = failure(KVQ_ERR_DAEMON_GONE, "kvqd at " + path_ + " did not answer " + what + " within " +
                                                         std::to_string(timeout_ms) + " ms; look at its log");
  return loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        if (session == nullptr) return link_->call(nullptr, deadline_ms, attempt);
        if (session->wire_ == nullptr) return failure(KVQ_ERR_STALE_ID, "the model of this handle was closed");
        return link_->call(session->wire_, deadline_ms, attempt);
      },
      timeout_ms, timeout);
}

// A kvqd that does not know the question serves one device.
kvq_status Connection::devices(std::uint32_t deadline_ms, std::vector<std::string>& out) {
  return call(nullptr, deadline_ms, "the question for its devices", [&](std::uint32_t) -> kj::Promise<Reply> {
    return link_->node().devicesRequest().send().then(
        [&out](auto&& response) -> kj::Promise<Reply> {
          out.clear();
          for (const auto name : response.getDevices()) out.emplace_back(name.cStr());
          return Reply{};
        },
        [](kj::Exception&& exception) -> kj::Promise<Reply> {
          if (exception.getType() == kj::Exception::Type::UNIMPLEMENTED) return Reply{};
          return kj::mv(exception);
        });
  });
}

// On the caller's thread, since its CUDA context counts.
kvq_status Connection::name_device(RegisterRequest& request) {
  if (!request.device.empty() || request.role == KVQ_ROLE_CONTROL) return KVQ_OK;
  std::vector<std::string> served;
  if (auto s = devices(request.deadline_ms, served); s != KVQ_OK || served.size() < 2) return s;
  VisibleGpus visible;
  if (auto s = find_visible_gpus(visible); s != KVQ_OK) return s;
  return choose_served(served, visible, request.device);
}

kvq_status Connection::register_model(RegisterRequest request, Grant& grant, std::unique_ptr<Session>& session) {
  if (auto s = name_device(request); s != KVQ_OK) return s;
  std::shared_ptr<Session::Wire> wire;
  const kvq_status status = call(nullptr, request.deadline_ms, "the registration",
                                 [&](std::uint32_t) { return register_on_loop(*link_, request, grant, wire); });
  if (wire == nullptr) return status;
  auto made = std::make_unique<Session>(*this, std::move(wire));
  if (status == KVQ_OK) session = std::move(made);
  return status;  // a session that got ready too late is given up here, before its memory in `grant`
}

Connection::Session::Session(Connection& connection, std::shared_ptr<Wire> wire)
    : connection_(connection), wire_(std::move(wire)), state_(wire_->state) {}

Connection::Session::~Session() { end(); }

void Connection::Session::end() {
  if (ended_.exchange(true)) return;
  connection_.loop_.run(
      [this](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        const std::shared_ptr<Wire> wire = std::move(wire_);
        wire->ended = true;
        wire->live = false;
        // The slabs go first: once the daemon sees the session's end, it waits for no acknowledgement of it any more.
        wire->sink->memory->forget_session(wire->sink->session);
        wire->sink->memory = nullptr;
        connection_.link_->remove(wire);
        wire->session = nullptr;
        wire->end_pair.fulfiller->fulfill();
        return Reply{};
      },
      kCallMs, Reply{});
}

kvq_status Connection::Session::credits(std::uint32_t pages, std::uint32_t deadline_ms) {
  return call(deadline_ms, "a request for credits", [&](std::uint32_t left_ms) -> kj::Promise<Reply> {
    auto call = wire_->session.creditsRequest();
    call.setPages(pages);
    call.setDeadlineMs(left_ms);
    return call.send().then([](auto&& response) { return reply_of(response.getStatus()); });
  });
}

kvq_status Connection::Session::attach(const Attach& request, std::vector<PageId>& pages) {
  return call(kCallMs, "an attach", [&](std::uint32_t) -> kj::Promise<Reply> {
    auto call = wire_->session.attachRequest();
    call.setSequence(raw(request.sequence));
    call.setLastPage(raw(request.last.page));
    call.setGeneration(request.last.generation);
    call.setPages(request.pages);
    call.setKey(kj::arrayPtr(request.key.data(), request.key.size()));
    call.setFormatFloorDense(request.format_floor_dense);
    return call.send().then([&request, &pages](auto&& response) -> Reply {
      kill_point(KillPoint::client_attached);
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
  });
}

kvq_status Connection::Session::resume(SequenceId sequence, std::uint32_t deadline_ms) {
  return call(deadline_ms, "a resume", [&](std::uint32_t left_ms) -> kj::Promise<Reply> {
    auto call = wire_->session.resumeRequest();
    call.setSequence(raw(sequence));
    call.setDeadlineMs(left_ms);
    return call.send().then([](auto&& response) { return reply_of(response.getStatus()); });
  });
}

kvq_status Connection::Session::lost_pages(std::uint64_t since, LostPages& lost) {
  return call(kCallMs, "a question for lost pages", [&](std::uint32_t) -> kj::Promise<Reply> {
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
  });
}

kvq_status Connection::Session::ping(std::uint32_t deadline_ms) {
  return call(deadline_ms, "a ping", [&](std::uint32_t) -> kj::Promise<Reply> {
    return wire_->session.pingRequest().send().then([](auto&&) -> Reply { return {}; });
  });
}

}  // namespace kvq::client
