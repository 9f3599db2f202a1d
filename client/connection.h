// The connection to kvqd: the calls that need the daemon, over one socket after the other.
//
// Invariant: everything of Cap'n Proto lives in Link and Wire objects that only the loop thread touches. When the
// socket breaks, the link comes back by itself (link.h); calls wait for that until their deadline and are made again,
// since each of them may be repeated. Memory that is mapped stays mapped. A session that the daemon of now does not
// know is lost: each of its calls returns DAEMON_GONE.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/loop_thread.h"
#include "client/mapped_file.h"
#include "client/tenant_memory.h"
#include "kvq/kvq.h"
#include "kvq/page_format.h"
#include "kvq/prefix_table.h"
#include "kvq/types.h"

namespace kvq::client {

// An owned descriptor.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  ~Fd();
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

struct RegisterRequest {
  ModelGeometry geometry;
  std::uint8_t fingerprint[32] = {};
  kvq_role role = KVQ_ROLE_BOTH;
  bool format_floor_dense = false;
  std::uint32_t credits = 0;
  std::uint32_t deadline_ms = 0;
  std::string device;  // UUID or "host"; empty: the daemon's own
};

// What a registration brings: all of it ready to use.
struct Grant {
  SessionId session{};
  std::string tenant_name, device;
  std::uint8_t salt[32] = {};
  Format cold_format = Format::none;
  std::shared_ptr<TenantMemory> memory;
  std::unique_ptr<MappedFile> segment;
  Fd doorbell, notice;
};

struct LostPages {
  std::vector<std::uint32_t> pages, sequences;
  std::uint64_t now = 0;
};

// What any thread may ask about a session without the loop.
class SessionState {
 public:
  std::atomic<bool> away{false};  // the link is broken, and the session not resumed yet
  std::atomic<std::uint32_t> reconnects{0};

  bool is_lost() const { return lost_.load(std::memory_order_acquire); }
  const std::string& lost_text() const { return lost_text_; }  // once lost
  // Loop thread, once: the daemon refused to resume the session.
  void lose(const std::string& socket_path, const std::string& why, bool revoked);

 private:
  std::string lost_text_;  // written before lost_
  std::atomic<bool> lost_{false};
};

class Link;

class Connection {
 public:
  class Session;

  // Errors: NO_DAEMON, PERMISSION_DENIED, INVALID_ARGUMENT (path too long), SYSTEM.
  static kvq_status open(const std::string& socket_path, const std::string& label, std::uint32_t deadline_ms,
                         std::unique_ptr<Connection>& out);
  ~Connection();  // no session is left
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Registers a model, maps everything, returns once all slabs of the tenant are mapped. Errors: as kvq_register_model.
  kvq_status register_model(RegisterRequest request, Grant& grant, std::unique_ptr<Session>& session);

 private:
  using Attempt = std::function<kj::Promise<Reply>(std::uint32_t left_ms)>;
  Connection(std::string path, std::string label);
  // What kvqd serves; none: it does not say, and has one.
  kvq_status devices(std::uint32_t deadline_ms, std::vector<std::string>& out);
  // Fills `request.device` where it is empty and kvqd has several.
  kvq_status name_device(RegisterRequest& request);
  // `session` null: a call on the daemon itself.
  kvq_status call(Session* session, std::uint32_t deadline_ms, const char* what, const Attempt& attempt);

  const std::string path_, label_;
  LoopThread loop_;
  std::unique_ptr<Link> link_;  // loop thread only
};

// One session's calls. Any thread; each blocks its caller until the daemon answered or the deadline passed. While kvqd
// is away, that long at most: DAEMON_GONE then. STALE_ID when end() comes first.
class Connection::Session {
 public:
  struct Attach {
    SequenceId sequence{};
    PrefixHit last;           // of the chain
    std::uint32_t pages = 0;  // length of the chain
    Key key{};                // of the last page
    bool format_floor_dense = false;
  };

  struct Wire;
  Session(Connection& connection, std::shared_ptr<Wire> wire);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Unmaps the session's slabs, then gives the session up; twice is once. Waits for no daemon. Calls that wait return.
  void end();

  kvq_status credits(std::uint32_t pages, std::uint32_t deadline_ms);
  kvq_status attach(const Attach& request, std::vector<PageId>& pages);
  kvq_status resume(SequenceId sequence, std::uint32_t deadline_ms);
  kvq_status lost_pages(std::uint64_t since, LostPages& lost);
  // Returns once the daemon has taken every command that was in the ring before.
  kvq_status ping(std::uint32_t deadline_ms);

  const SessionState& state() const { return *state_; }

 private:
  friend class Connection;
  kvq_status call(std::uint32_t deadline_ms, const char* what, const Attempt& attempt) {
    return connection_.call(this, deadline_ms, what, attempt);
  }

  Connection& connection_;  // not used any more once ended
  std::atomic<bool> ended_{false};
  std::shared_ptr<Wire> wire_;  // loop thread only; null once ended
  const std::shared_ptr<SessionState> state_;
};

}  // namespace kvq::client
