// The daemon's face: serves the wire schema on a listening Unix socket.
//
// Invariant: this header is all that main knows of the rpc room. Everything runs on the loop thread; the server lives
// until it is destroyed, before the store and the loop; the listening descriptor stays the caller's.
#pragma once

#include <kj/async-io.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/event_loop.h"
#include "daemon/rpc/event_ring.h"
#include "daemon/store.h"

namespace kvq {

// Who belongs to a tenant. A uid listed anywhere wins over a gid listed anywhere.
struct TenantRule {
  TenantId tenant{};
  std::vector<uid_t> uids;
  std::vector<gid_t> gids;  // primary or supplementary
};

// A GPU that should be served and is not.
struct DeviceAbsent {
  std::string uuid;
  std::string why;  // cause and fix
};

// What kvqd was configured with, of that which may be changed while it runs.
struct Configured {
  struct Limits {
    std::uint64_t quota_bytes = 0;
    double share = 1.0;
  };
  std::string file;                       // absolute path; empty: there is none
  std::vector<std::string> command_line;  // options and values, as given
  Watermarks watermarks;
  std::map<std::string, Limits> tenants;  // by name
  std::optional<Limits> unlisted;         // of each tenant that is made by uid
};

struct RpcOptions {
  std::vector<TenantRule> rules;
  // Model of the tenant that every other uid gets, named "uid-N" (its salt is made by `make_salt`). None: refused.
  std::optional<TenantSpec> unlisted;
  std::function<std::array<std::uint8_t, 32>()> make_salt;

  // Who besides root may administer.
  std::vector<uid_t> admin_uids;
  std::optional<gid_t> admin_gid;
  std::string admin_group;  // its name, for messages

  // What SessionInfo tells each client, beside the store's instance.
  std::uint64_t range_bytes = 0;  // of addresses, in which every slab has its place
  std::uint64_t slab_bytes = 0;
  Format cold_format = Format::int4;
  std::string device;
  std::string device_uuid;         // empty on the host
  std::string served_as;           // what clients name it by: a GPU's UUID, or "host"; empty: device_uuid or `device`
  std::uint64_t mirror_bytes = 0;  // 0: kernels read the directory itself

  std::uint32_t tick_ms = 10;
  std::uint32_t max_connections = 512;  // the last 16 are kept for root; one uid gets at most a quarter (at least 8)
  std::uint32_t max_sessions = UINT32_MAX;      // on all devices
  std::uint32_t max_sessions_per_peer = 32;     // of one process, whatever its connections
  std::uint32_t max_admins_per_peer = 4;        // Admin capabilities of one connection
  std::uint32_t max_questions_per_peer = 1024;  // calls whose answers a connection has not given back
  std::uint32_t max_parked_per_session = 64;    // requests that wait for room
  std::uint32_t acknowledge_ms = 30'000;        // a session that has not mapped a slab by then is cut
  std::uint32_t stalled_write_ms = 10'000;      // a peer that has not read its replies by then is cut
  std::uint32_t read_deadline_ms = 10'000;      // a peer in the middle of a message for longer is cut
  std::uint32_t idle_ms = 60'000;               // a peer without a session and an Admin capability is cut
  std::uint32_t reconnect_ms = 10'000;          // how long an adopted session waits for its client
  std::uint32_t step_deadline_ms = 30'000;      // an older step makes `kvqctl sessions` mark its session

  std::vector<DeviceAbsent> not_served;

  // Where descriptors of sessions are kept for the next daemon, and what an earlier one left. Both may be null;
  // `keeper` outlives the server, `kept` the call of serve().
  Keeper* keeper = nullptr;
  Kept* kept = nullptr;

  Configured* configured = nullptr;   // outlives the server, and may change. Null: nothing is known
  const EventRing* events = nullptr;  // what `kvqctl events` shows; outlives the server. Null: nothing
  std::function<void(const std::string& line)> log = [](const std::string&) {};  // key=value text, one event each
};

// What the rpc room itself has done for one device since the daemon started. Only grows.
struct SessionCounts {
  std::uint64_t opened = 0;
  std::uint64_t closed = 0, lost = 0, evicted = 0;  // ended: given up by its client, without a word, by an operator
  TimeHistogram alloc_wait;                         // of each request for pages, until it was met or refused
  TimeHistogram restore;                            // of each parked sequence, until it ran again or was refused
};

struct DeviceReport {
  std::string name;  // "host" or a UUID
  StoreStatus store;
  SessionCounts counts;
  std::size_t sessions = 0, parked = 0;  // those not yet released; requests that wait for room
  std::uint64_t ticks = 0;
};

// All of kvqd at one moment.
struct NodeReport {
  std::uint64_t uptime_ms = 0, step_deadline_ms = 0;
  std::size_t connections = 0;
  std::vector<DeviceReport> devices;
};

class RpcServer {
 public:
  virtual ~RpcServer() = default;

  // Store::DeliverNotice of the part with that number must end here.
  virtual void deliver(const SlabNotice& notice, std::size_t part = 0) = 0;
  // Work of its device has finished: the next tick should come at once.
  virtual void tick_soon(std::size_t part = 0) = 0;
  // From here on the end of a connection or of the server ends no session: the next daemon goes on with them.
  virtual void leave() = 0;
  // Resolves when `drain` was asked for, the sessions have ended (or its deadline passed) and the answer is on its way.
  virtual kj::Promise<void> drained() = 0;

  virtual std::size_t connections() const = 0;
  virtual std::size_t sessions() const = 0;  // those not yet released, connected or not
  virtual NodeReport report() const = 0;
};

// One device: its store, and what differs between devices: tenants, what SessionInfo tells, what is kept. All else in
// `options` is of the daemon, and the first part's counts.
struct RpcPart {
  Store& store;
  RpcOptions options;
};

// Takes up the sessions that the stores adopted and starts to accept on `listening_fd`. `io` and `loop` belong to one
// event loop and, like the stores, outlive the server.
std::unique_ptr<RpcServer> serve(EventLoop& loop, kj::LowLevelAsyncIoProvider& io, std::vector<RpcPart> parts,
                                 int listening_fd);
// Of one device.
std::unique_ptr<RpcServer> serve(EventLoop& loop, kj::LowLevelAsyncIoProvider& io, Store& store, int listening_fd,
                                 RpcOptions options);

}  // namespace kvq
