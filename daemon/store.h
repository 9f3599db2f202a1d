// The store: single owner of all cache state. Everything the daemon knows about tenants, sessions, sequences, pages and
// slabs changes here and nowhere else.
//
// Invariant: the loop thread alone calls it; no function waits, reads a clock or allocates room by itself. Handlers
// take what is free; only tick() makes room, in this order: drain command rings, collect finished transcodes and
// publish them, advance epochs and reap limbo, give empty slabs back, measure pressure, plan, submit, fill magazines.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/core/pressure.h"
#include "daemon/device/device.h"
#include "daemon/shm/descriptor.h"
#include "daemon/store_counts.h"
#include "daemon/store_lists.h"
#include "kvq/page_format.h"
#include "kvq/prefix_table.h"
#include "kvq/result.h"
#include "kvq/types.h"

namespace kvq {

struct TenantSpec {
  std::string name;
  std::uint64_t quota_bytes = 0;  // of slabs; 0: the whole arena
  double share = 1.0;             // weight when the arena is short: who is furthest over pays first
  bool floor_dense = false;       // pages of this tenant are never quantized
  bool random_salt = false;       // `salt` is new: an adopted tenant keeps the one it has
  std::array<std::uint8_t, 32> salt{};
};

struct StoreConfig {
  std::uint32_t max_pages = 65536;  // directory capacity of each tenant
  std::uint32_t max_sessions = 256;
  std::uint32_t max_sequences = 16384;     // of all sessions together
  std::uint64_t step_deadline_ms = 10000;  // a session whose step blocks reuse for longer gets no new pages
  std::uint64_t keep_empty_ms = 2000;      // how long an empty slab is kept below evict
  std::uint32_t reserve_slabs = 1;         // only transcodes may take them
  std::uint32_t window_pages = 2;          // newest pages of a running sequence that stay dense
  std::uint32_t sink_pages = 1;            // first pages of a sequence that stay dense while it runs
  std::uint32_t actions_per_tick = 64;     // bound of a plan
  std::uint32_t session_range = 0;         // of a new store's sessions: their ids are unique over all stores of a kvqd
  Format cold_format = Format::int4;
  Watermarks watermarks;
  // Page records that each walk of a list for operators looks at: 3 to 5 ms of the loop.
  std::uint32_t most_pages_looked = 1u << 17;
};

// A session's id has its store's range in the upper bits; an adopted store keeps the range that it has.
inline constexpr std::uint32_t kSessionsOfRange = 1u << 26;
inline constexpr std::uint32_t kSessionRanges = 64;
inline std::uint32_t session_range_of(SessionId id) { return raw(id) / kSessionsOfRange; }

struct SessionRequest {
  TenantId tenant{};
  std::uint32_t pid = 0, uid = 0;
  std::string label;
  ModelGeometry geometry;
  std::array<std::uint8_t, 32> fingerprint{};
  bool floor_dense = false;
  bool maps_slabs = true;  // false for the control role: it acknowledges no slab
  std::uint32_t credits = 0;
};

// What the rpc room must do for a session: map or unmap a slab, then call acknowledge().
struct SlabNotice {
  SessionId session{};
  SlabId slab{};
  bool map = true;
  bool writable = false;
  int descriptor = -1;       // owned by the device; valid during the call that delivers the notice
  std::uint64_t serial = 0;  // Device::slab_serial
};

struct SessionMemory {  // descriptors owned by the store; valid while the session lives
  int directory_read_only = -1;
  int prefix_table_read_only = -1;
  int segment = -1;
  int mirror = -1;  // Device::mirror_descriptor; there once the session is ready, on devices that have one
};

using SessionToken = std::array<std::uint8_t, 16>;

// A session of an earlier daemon, as its record says.
struct AdoptedSession {
  SessionId id{};
  TenantId tenant{};
  std::uint32_t pid = 0, uid = 0;
  std::string label;
  bool waits = false;  // its client may come back; false: it had lost its connection before
};

// What is kept beside the store for the next daemon: daemon/keeper.h makes it of the service manager, tests of a map.
class Keeper {
 public:
  virtual ~Keeper() = default;
  // Stores a duplicate of `fd` under `name` (unique, 1 to 64 of a-z 0-9 -). Never waits.
  virtual void keep(const std::string& name, int fd) = 0;
  virtual void forget(const std::string& name) = 0;
};

// Descriptors that an earlier daemon left, by name. The store takes those it knows ("kvq-...") and leaves the rest.
using Kept = std::map<std::string, Descriptor>;

struct VerifyStatus {
  std::uint64_t pages_total = 0, pages_done = 0, pages_bad = 0;  // of the running or the last pass
  std::uint64_t passes = 0;                                      // finished since start
  std::uint64_t pages_bad_ever = 0;                              // since start, whoever found them
  bool running = false;
};

struct AdoptReport {  // of this daemon's start
  bool adopted = false;
  std::string refused;  // why the state of an earlier daemon was not taken; empty: there was none, or it was
  std::uint32_t sessions = 0, sequences = 0, slabs = 0;
  std::uint64_t pages = 0, undone_bytes = 0;
};

struct LostPage {
  PageId page{};
  SequenceId sequence{};  // of the session asked for
};

struct TickReport {
  std::uint32_t commands = 0, transcodes_done = 0, transcodes_failed = 0, submitted = 0, dropped_pages = 0,
                reaped_slots = 0, slabs_created = 0, slabs_destroyed = 0;
  PressureLevel level = PressureLevel::calm;
  bool busy = false;  // something is in flight or waiting: tick again soon
};

// --- snapshots for kvqctl: plain values, additive (the parts of each tenant sum to its total) ---

struct TenantStatus {
  TenantId id{};
  std::string name;
  std::uint64_t quota_bytes = 0, slab_bytes = 0;                  // slab_bytes: memory it holds, whole slabs
  std::uint64_t page_bytes = 0, limbo_bytes = 0, free_bytes = 0;  // of those: live pages, retired slots, free slots
  double share = 1.0;
  FormatUse format[kFormatCount];
  std::uint64_t open_pages = 0, sealed_pages = 0, cached_pages = 0;  // cached: sealed and held by no sequence
  std::uint32_t sessions = 0;
  PressureLevel level = PressureLevel::calm;
  bool configured = true;  // false: an earlier daemon's, which this one's settings do not name
  TenantCounts counts;
};

struct SessionStatus {
  SessionId id{};
  TenantId tenant{};
  std::uint32_t pid = 0;
  std::string label;
  bool connected = true, ready = false;
  std::uint32_t sequences = 0, running = 0;
  std::uint64_t pages = 0;  // references held by its sequences
  std::uint32_t credits = 0, credits_target = 0;
  std::uint32_t open_steps = 0;
  std::uint64_t oldest_step_epochs = 0;  // epochs since its oldest open step began, 0 if none
  std::uint64_t oldest_step_ms = 0;      // how long its oldest open step has been seen open
  std::uint64_t limbo_bytes = 0;         // retired slots that this session's oldest step holds back
  bool waits_for_client = false;         // adopted, and its client has not come back yet
  bool evicted = false;
  std::uint64_t lost_pages = 0;
  std::uint64_t commands_refused = 0;
};

struct PageStatus {
  TenantId tenant{};
  PageId page{};
  std::uint16_t generation = 0;
  Format format = Format::none;
  std::string state;  // page table's name of it
  SlabId slab{};
  std::uint32_t slot = 0, references = 0;
  std::uint64_t idle_ms = 0;
  bool indexed = false;
  std::string stays_dense;  // why it cannot be quantized, if so
};

struct StoreStatus {
  std::uint64_t arena_bytes = 0, slab_bytes = 0;
  // target: what the arena is to be; less than it is while slabs above it are in use. start: of the configuration.
  // most: what a resize may ask for.
  std::uint64_t target_bytes = 0, start_bytes = 0, most_bytes = 0;
  std::uint32_t slabs = 0, slabs_free = 0, slabs_reserved = 0;
  std::uint32_t slabs_over = 0;  // in use, above the target
  PressureLevel level = PressureLevel::calm;
  Watermarks watermarks;
  std::uint64_t limbo_slots = 0;
  std::uint64_t oldest_step_ms = 0;  // how long the oldest open step has been seen open
  std::uint32_t transcodes_in_flight = 0;
  StoreCounts counts;
  bool draining = false;
  std::uint64_t instance = 0;  // random per arena; stays over adoption
  VerifyStatus verify;
  AdoptReport adopt;
  DeviceHealth device;
  std::vector<TenantStatus> tenants;
};

// The arena of an earlier daemon, as its root says.
struct KeptArena {
  std::uint64_t most_bytes = 0, slab_bytes = 0;  // most: its range of addresses
  std::string device;                            // Device::name
  std::uint32_t session_range = 0;
};
std::optional<KeptArena> kept_arena(const Kept& kept);

struct QuantizeReport {
  std::uint64_t pages = 0, bytes_before = 0, bytes_after = 0;
};
struct DropReport {
  std::uint64_t pages = 0, bytes = 0;
};
struct ResizeReport {
  std::uint64_t bytes_before = 0;
  std::uint32_t slabs_used = 0, slabs_over = 0;  // over: in use, above the new size
};
struct CompactReport {
  std::uint64_t pages = 0, bytes = 0;  // that move
  std::uint64_t slabs = 0;             // that get empty by it
};

class Store {
 public:
  using DeliverNotice = std::function<void(const SlabNotice&)>;
  using LogDecision = std::function<void(const std::string& line)>;  // key=value text, one decision each

  static std::unique_ptr<Store> create(const StoreConfig& config, Device& device, DeliverNotice deliver,
                                       LogDecision log, Keeper* keeper = nullptr, std::string adopt_refused = {});
  // Takes over what an earlier daemon left: all of it, or nothing and the reason (then `kept` is used up, `device` must
  // not be used any more, and every name must be forgotten). No "kvq-root" in `kept`: stale_id.
  static Result<std::unique_ptr<Store>> adopt(const StoreConfig& config, Device& device, DeliverNotice deliver,
                                              LogDecision log, Keeper& keeper, Kept& kept, std::string& why_not,
                                              std::uint64_t now_ms);
  virtual ~Store() = default;

  // Start-up and configuration.
  // Ids from 1; names are unique (asserted), but one that was adopted is taken up again: then all of `spec` but a
  // random salt (`random_salt`) replaces what the record says.
  virtual TenantId add_tenant(const TenantSpec& spec) = 0;
  virtual std::optional<TenantId> find_tenant(const std::string& name) const = 0;
  virtual const TenantSpec& tenant(TenantId id) const = 0;
  virtual Result<void> set_watermarks(const Watermarks& watermarks) = 0;
  virtual Result<void> set_quota(TenantId id, std::uint64_t quota_bytes) = 0;
  virtual Result<void> set_share(TenantId id, double share) = 0;
  virtual void start_draining() = 0;

  // Sessions. open_session delivers a map notice for each slab of the tenant; is_ready turns true when all are
  // acknowledged.
  virtual Result<SessionId> open_session(const SessionRequest& request, std::uint64_t now_ms) = 0;
  virtual SessionMemory memory(SessionId id) const = 0;
  virtual bool is_ready(SessionId id) const = 0;
  virtual void acknowledge(SessionId id, SlabId slab, bool mapped) = 0;
  // The socket closed: no new requests. What the process holds stays until process_ended (its pidfd), since it may
  // still run.
  virtual void disconnect(SessionId id) = 0;
  // The process is gone: its steps are cleared, its sequences and credits released, its acknowledgements no longer
  // awaited.
  virtual void process_ended(SessionId id, std::uint64_t now_ms) = 0;
  // Ends what the session holds now, as if it had released all; its open steps still hold back what they may read. The
  // caller has cut its connection or does so. stale_id: no such session.
  virtual Result<void> evict(SessionId id, std::uint64_t now_ms) = 0;

  // Sessions of an earlier daemon, right after adopt().
  virtual std::vector<AdoptedSession> adopted_sessions() const = 0;
  // Its client is back: delivers a map notice for each slab of its tenant, and unmap for those that go. It was ready
  // before and stays so. stale_id: no such session waits; permission_denied: the token is another; wrong_layout: the
  // model in `request` is another than it registered.
  virtual Result<void> resume_session(SessionId id, const SessionToken& token, const SessionRequest& request,
                                      std::uint64_t now_ms) = 0;

  // Requests. drain_commands runs before each request of a session, so that ring and RPC keep their order.
  virtual std::uint32_t drain_commands(SessionId id, std::uint64_t now_ms) = 0;
  // Asks for `pages` unused pages in the magazine. ok: they are there. no_memory: not yet; the wish is remembered for
  // tick() until withdraw_credits. over_quota / limit_reached: can never be met.
  virtual Result<void> request_credits(SessionId id, std::uint32_t pages) = 0;
  virtual void withdraw_credits(SessionId id) = 0;
  virtual Result<std::vector<PageId>> attach(SessionId id, SequenceId sequence, PageId last_page,
                                             std::uint16_t generation, std::uint32_t pages, const Key& key,
                                             bool floor_dense, std::uint64_t now_ms) = 0;
  virtual Result<void> resume(SessionId id, SequenceId sequence, std::uint64_t now_ms) = 0;
  // Pages that the session's sequences hold and whose content is gone, after the first `since` of them; `now`: how many
  // there are in all.
  virtual std::vector<LostPage> lost_pages(SessionId id, std::uint64_t since, std::uint64_t& now) const = 0;

  virtual TickReport tick(std::uint64_t now_ms) = 0;
  // Sessions whose words or magazine changed since the last call: ring their notice eventfds.
  virtual std::vector<SessionId> take_notices() = 0;

  // Operators.
  virtual StoreStatus status() const = 0;
  virtual std::vector<SessionStatus> sessions() const = 0;
  virtual std::vector<PageStatus> pages(TenantId id, std::uint32_t limit, std::uint64_t now_ms) const = 0;
  // Of one tenant or all, of one session or (id 0) all: the longest `limit`.
  virtual SequenceList sequences(std::optional<TenantId> tenant, SessionId session, std::uint32_t limit,
                                 std::uint64_t now_ms) const = 0;
  // Of one tenant or all, with the `limit` longest unused chains.
  virtual PrefixStatus prefix(std::optional<TenantId> tenant, std::uint32_t limit, std::uint64_t now_ms) const = 0;
  // Marks sealed dense pages idle for `idle_ms` (of one tenant or all) for transcoding in the coming ticks.
  virtual QuantizeReport quantize(std::optional<TenantId> id, std::uint64_t idle_ms, bool dry_run,
                                  std::uint64_t now_ms) = 0;
  // Marks cached pages idle for `idle_ms` to be dropped in the coming ticks, children before their parents. One that is
  // held or used until then stays.
  virtual DropReport drop_cached(std::optional<TenantId> id, std::uint64_t idle_ms, bool dry_run,
                                 std::uint64_t now_ms) = 0;
  // Marks slabs whose pages fit into others to be emptied in the coming ticks.
  virtual CompactReport compact(std::optional<TenantId> id, bool dry_run, std::uint64_t now_ms) = 0;

  // The arena becomes as large as `arena_bytes` says: at once for pressure and new slabs; slabs above it go as they
  // become free. A next daemon of the same configuration keeps the size. Errors: invalid_argument (not whole slabs, or
  // none beside the reserve), limit_reached (above status().most_bytes, or this device's memory cannot change).
  virtual Result<ResizeReport> resize(std::uint64_t arena_bytes, bool dry_run) = 0;

  // Starts to compare every sealed page (of one tenant or all) with its checksum, in the coming ticks; status().verify
  // tells how far it is. A pass that runs goes on, and what is new is added.
  virtual void verify(std::optional<TenantId> id) = 0;

  // Asserts that slots, references, credits and charges add up. O(pages): for tests.
  virtual void check_invariants() const = 0;
};

}  // namespace kvq
