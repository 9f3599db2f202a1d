// The connection to kvqd: the socket, the Node capability and the calls that need the daemon.
//
// Invariant: everything of Cap'n Proto lives in Wire objects that only the loop thread touches. When the socket breaks,
// every waiting call and every later one returns DAEMON_GONE and the notice eventfds ring; memory that is mapped stays
// mapped.
#pragma once

#include <atomic>
#include <cstdint>
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
  kvq_status register_model(const RegisterRequest& request, Grant& grant, std::unique_ptr<Session>& session);

  bool gone() const { return gone_.load(std::memory_order_acquire); }
  kvq_status say_gone() const;  // DAEMON_GONE with its text

  struct Wire;

 private:
  Connection(std::string path, std::string label);
  kvq_status call(LoopThread::Body body, std::uint64_t timeout_ms, const char* what);
  void broke();

  const std::string path_, label_;
  LoopThread loop_;
  std::unique_ptr<Wire> wire_;  // loop thread only
  std::atomic<bool> gone_{false};
};

// One session's calls. Any thread; each blocks its caller until the daemon answered or the deadline passed.
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
  Session(Connection& connection, std::unique_ptr<Wire> wire);
  ~Session();  // unmaps the session's slabs, then gives the session up
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  kvq_status credits(std::uint32_t pages, std::uint32_t deadline_ms);
  kvq_status attach(const Attach& request, std::vector<PageId>& pages);
  kvq_status resume(SequenceId sequence, std::uint32_t deadline_ms);
  kvq_status lost_pages(std::uint64_t since, LostPages& lost);
  // Returns once the daemon has taken every command that was in the ring before.
  kvq_status ping();

  bool gone() const { return connection_.gone(); }
  kvq_status say_gone() const { return connection_.say_gone(); }

 private:
  Connection& connection_;
  std::unique_ptr<Wire> wire_;  // loop thread only
};

}  // namespace kvq::client
