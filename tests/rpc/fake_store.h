// A store that does what a test tells it, and remembers what the rpc room asked of it.
//
// Invariant: it decides nothing: outcomes are set by the test beforehand, calls are listed in the order they came.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "daemon/store.h"

namespace kvq::testing {

class FakeStore final : public Store {
 public:
  explicit FakeStore(std::uint32_t slabs_at_open = 1) : slabs_at_open_(slabs_at_open) {
    memory_fd_ = ::memfd_create("fake", MFD_CLOEXEC);
    EXPECT_EQ(::ftruncate(memory_fd_, 4096), 0);
    EXPECT_EQ(::pwrite(memory_fd_, "slab", 4, 0), 4);
  }
  ~FakeStore() override { ::close(memory_fd_); }

  DeliverNotice deliver = [](const SlabNotice&) {};
  std::vector<std::string> calls;

  // What the next calls answer.
  Error open_error, attach_error;
  bool room = true;     // for credits and resume
  Error credits_error;  // overrides `room`
  bool busy = false;
  std::uint32_t open_steps = 0;
  std::uint64_t ticks = 0;
  std::function<void()> on_tick = [] {};
  std::set<SessionId> notices;

  struct Live {
    SessionRequest request;
    std::set<std::uint32_t> unmapped;  // slabs announced and not acknowledged
    bool connected = true, waits = false, evicted = false;
  };
  std::map<SessionId, Live> live;
  std::vector<TenantSpec> tenants;
  Watermarks watermarks;
  std::uint64_t slab_bytes = 1 << 20;
  bool draining = false;

  void count_from(std::uint32_t id) { last_id_ = id; }
  void announce(SessionId id, std::uint32_t slab, bool map) {
    if (map) live[id].unmapped.insert(slab);
    deliver({id, SlabId{slab}, map, map, map ? memory_fd_ : -1});
  }
  std::size_t count(const std::string& call) const {
    return static_cast<std::size_t>(std::count(calls.begin(), calls.end(), call));
  }

  // --- an earlier daemon's sessions ---
  static constexpr SessionToken kToken = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  std::vector<AdoptedSession> adopted;
  Error resume_error;

  void adopt(const AdoptedSession& session) {
    adopted.push_back(session);
    live[session.id].request.tenant = session.tenant;
    live[session.id].request.pid = session.pid;
    live[session.id].waits = session.waits;
    live[session.id].connected = session.waits;
    last_id_ = std::max(last_id_, raw(session.id));
  }
  std::vector<AdoptedSession> adopted_sessions() const override { return adopted; }
  Result<void> resume_session(SessionId id, const SessionToken& token, const SessionRequest& request,
                              std::uint64_t) override {
    EXPECT_TRUE(live.at(id).waits);
    calls.push_back("resume_session");
    for (std::uint32_t slab = 0; slab < slabs_at_open_; ++slab) announce(id, slab, true);
    if (token != kToken) return Error{Errc::permission_denied, 0, "the token is another"};
    if (resume_error.code != Errc::ok) return resume_error;
    live[id].request = request;
    live[id].waits = false;
    notices.insert(id);
    return {};
  }

  // --- operators ---
  VerifyStatus verifying;
  AdoptReport adopt_report;
  std::uint64_t oldest_step_ms = 0;
  std::vector<LostPage> lost;

  Result<void> evict(SessionId id, std::uint64_t) override {
    if (live.count(id) == 0) return Error{Errc::stale_id, 0, "no such session"};
    calls.push_back("evict");
    live[id].evicted = true;
    return {};
  }
  std::vector<LostPage> lost_pages(SessionId, std::uint64_t since, std::uint64_t& now) const override {
    now = lost.size();
    return {lost.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(since, now)), lost.end()};
  }
  void verify(std::optional<TenantId> tenant) override {
    calls.push_back(tenant ? "verify " + std::to_string(raw(*tenant)) : "verify");
    verifying.running = true;
  }

  TenantId add_tenant(const TenantSpec& spec) override {
    tenants.push_back(spec);
    return TenantId{static_cast<std::uint32_t>(tenants.size())};
  }
  std::optional<TenantId> find_tenant(const std::string& name) const override {
    for (std::uint32_t i = 0; i < tenants.size(); ++i) {
      if (tenants[i].name == name) return TenantId{i + 1};
    }
    return std::nullopt;
  }
  const TenantSpec& tenant(TenantId id) const override { return tenants.at(raw(id) - 1); }
  Result<void> set_watermarks(const Watermarks& marks) override {
    if (!valid(marks)) return Error{Errc::invalid_argument, 0, "watermarks out of order"};
    watermarks = marks;
    return {};
  }
  Result<void> set_quota(TenantId id, std::uint64_t bytes) override {
    tenants.at(raw(id) - 1).quota_bytes = bytes;
    return {};
  }
  Result<void> set_share(TenantId id, double share) override {
    tenants.at(raw(id) - 1).share = share;
    return {};
  }
  void start_draining() override { draining = true; }

  std::function<void()> on_open = [] {};
  Result<SessionId> open_session(const SessionRequest& request, std::uint64_t) override {
    on_open();
    if (open_error.code != Errc::ok) return open_error;
    if (draining) return Error{Errc::draining, 0, "kvqd is draining"};
    const SessionId id{++last_id_};
    live[id].request = request;
    if (request.maps_slabs) {
      for (std::uint32_t slab = 0; slab < slabs_at_open_; ++slab) announce(id, slab, true);
    }
    notices.insert(id);
    return id;
  }
  SessionMemory memory(SessionId) const override { return {memory_fd_, memory_fd_, memory_fd_}; }
  bool is_ready(SessionId id) const override { return live.at(id).unmapped.empty(); }
  void acknowledge(SessionId id, SlabId slab, bool mapped) override {
    calls.push_back(mapped ? "mapped" : "unmapped");
    live.at(id).unmapped.erase(raw(slab));
  }
  void disconnect(SessionId id) override {
    calls.push_back("disconnect");
    live.at(id).connected = false;
  }
  void process_ended(SessionId id, std::uint64_t) override {
    calls.push_back("process_ended");
    EXPECT_EQ(live.erase(id), 1u);
  }
  std::uint32_t drain_commands(SessionId id, std::uint64_t) override {
    EXPECT_TRUE(live.at(id).connected);
    calls.push_back("drain_commands");
    return 0;
  }
  Result<void> request_credits(SessionId, std::uint32_t) override {
    calls.push_back("request_credits");
    if (credits_error.code != Errc::ok) return credits_error;
    if (!room) return Error{Errc::no_memory, 0, "no room yet"};
    return {};
  }
  void withdraw_credits(SessionId) override { calls.push_back("withdraw_credits"); }
  Result<std::vector<PageId>> attach(SessionId, SequenceId, PageId, std::uint16_t, std::uint32_t pages, const Key&,
                                     bool, std::uint64_t) override {
    calls.push_back("attach");
    if (attach_error.code != Errc::ok) return attach_error;
    std::vector<PageId> out;
    for (std::uint32_t i = 0; i < pages; ++i) out.push_back(PageId{i + 10});
    return out;
  }
  Result<void> resume(SessionId, SequenceId, std::uint64_t) override {
    calls.push_back("resume");
    if (!room) return Error{Errc::no_memory, 0, "no room yet"};
    return {};
  }

  TickReport tick(std::uint64_t) override {
    ++ticks;
    on_tick();
    TickReport report;
    report.busy = busy;
    return report;
  }
  std::vector<SessionId> take_notices() override {
    std::vector<SessionId> out(notices.begin(), notices.end());
    notices.clear();
    return out;
  }
  StoreStatus status() const override {
    StoreStatus out;
    out.watermarks = watermarks;
    out.arena_bytes = out.target_bytes = arena_bytes;
    out.most_bytes = most_bytes;
    out.slab_bytes = slab_bytes;
    out.slabs_reserved = 1;
    out.device.exporter = exporter;
    out.draining = draining;
    out.instance = 0x1234;
    out.verify = verifying;
    out.adopt = adopt_report;
    for (std::uint32_t i = 0; i < tenants.size(); ++i) {
      TenantStatus t;
      t.id = TenantId{i + 1};
      t.name = tenants[i].name;
      t.quota_bytes = tenants[i].quota_bytes;
      t.share = tenants[i].share;
      t.counts = counts;
      out.tenants.push_back(t);
    }
    return out;
  }
  std::vector<SessionStatus> sessions() const override {
    std::vector<SessionStatus> out;
    for (const auto& [id, session] : live) {
      SessionStatus s;
      s.id = id;
      s.tenant = session.request.tenant;
      s.pid = session.request.pid;
      s.label = session.request.label;
      s.connected = session.connected;
      s.ready = session.unmapped.empty();
      s.open_steps = open_steps;
      s.oldest_step_ms = oldest_step_ms;
      s.waits_for_client = session.waits;
      s.evicted = session.evicted;
      out.push_back(s);
    }
    return out;
  }
  std::vector<PageStatus> pages(TenantId id, std::uint32_t limit, std::uint64_t) const override {
    std::vector<PageStatus> out;
    for (std::uint32_t i = 0; i < std::min(limit, 3u); ++i) {
      PageStatus page;
      page.tenant = id;
      page.page = PageId{i + 1};
      page.format = Format::dense;
      page.state = "sealed";
      out.push_back(page);
    }
    return out;
  }
  SequenceList sequence_list;
  PrefixStatus prefix_status;
  TenantCounts counts;  // of each tenant
  SequenceList sequences(std::optional<TenantId> tenant, SessionId session, std::uint32_t limit,
                         std::uint64_t) const override {
    SequenceList out;
    for (const SequenceStatus& s : sequence_list.longest) {
      if ((tenant && s.tenant != *tenant) || (session != SessionId{} && s.session != session)) continue;
      ++out.total;
      if (out.longest.size() < limit) out.longest.push_back(s);
    }
    return out;
  }
  PrefixStatus prefix(std::optional<TenantId>, std::uint32_t, std::uint64_t) const override { return prefix_status; }
  QuantizeReport quantize(std::optional<TenantId>, std::uint64_t, bool dry_run, std::uint64_t) override {
    calls.push_back(dry_run ? "quantize dry" : "quantize");
    return {3, 300, 90};
  }
  DropReport drop_cached(std::optional<TenantId> tenant, std::uint64_t idle_ms, bool dry_run, std::uint64_t) override {
    calls.push_back("drop_cached " + (tenant ? std::to_string(raw(*tenant)) : "all") + " " + std::to_string(idle_ms) +
                    (dry_run ? " dry" : ""));
    return {5, 500};
  }
  CompactReport compact(std::optional<TenantId> tenant, bool dry_run, std::uint64_t) override {
    calls.push_back("compact " + (tenant ? std::to_string(raw(*tenant)) : "all") + (dry_run ? " dry" : ""));
    return {4, 400, 2};
  }
  std::uint64_t arena_bytes = 8 << 20, most_bytes = 64 << 20;  // in slabs of 1 MiB, one of them reserved
  std::uint32_t slabs_used = 0;
  std::string exporter;
  Result<ResizeReport> resize(std::uint64_t bytes, bool dry_run) override {
    calls.push_back("resize " + std::to_string(bytes >> 20) + (dry_run ? " dry" : ""));
    const auto slabs = static_cast<std::uint32_t>(bytes >> 20);
    const ResizeReport report{arena_bytes, slabs_used, slabs_used - std::min(slabs, slabs_used)};
    if (!dry_run) arena_bytes = bytes;
    return report;
  }
  void check_invariants() const override {}

 private:
  const std::uint32_t slabs_at_open_;
  std::uint32_t last_id_ = 0;
  int memory_fd_ = -1;
};

}  // namespace kvq::testing
