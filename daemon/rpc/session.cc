// Node and Session: each call checks its arguments, takes the session's ring first, then asks the store once.
#include "daemon/rpc/session.h"

#include <kj/debug.h>

#include <algorithm>

#include "daemon/rpc/registration.h"
#include "daemon/rpc/wire.h"
#include "kvq/kill_point.h"

namespace kvq {
namespace {

constexpr std::uint32_t kForeverMs = UINT32_MAX;

class SessionServer final : public wire::Session::Server {
 public:
  SessionServer(Sessions& sessions, std::shared_ptr<LiveSession> session)
      : sessions_(sessions), session_(std::move(session)) {}
  ~SessionServer() noexcept(false) {
    // A call that waits may keep this beyond the end of `sessions_`, which has ended or left the session then.
    if (!session_->closed && !session_->left) sessions_.close(*session_);
  }

  kj::Promise<void> directory(DirectoryContext context) override { return give(context, session_->directory); }
  kj::Promise<void> prefixTable(PrefixTableContext context) override { return give(context, session_->prefix_table); }
  kj::Promise<void> segment(SegmentContext context) override { return give(context, session_->segment); }
  kj::Promise<void> doorbell(DoorbellContext context) override { return give(context, session_->doorbell_memory); }
  kj::Promise<void> notice(NoticeContext context) override { return give(context, session_->notice_memory); }

  // Not made before somebody asks: it is there once the session is ready.
  kj::Promise<void> mirror(MirrorContext context) override {
    require_open();
    const int fd = store().memory(session_->id).mirror;
    KJ_REQUIRE(fd >= 0, "there is no mirror, or not yet: await ready first");
    context.getResults().setMemory(make_memory(duplicate(fd)));
    return kj::READY_NOW;
  }

  kj::Promise<void> ready(ReadyContext context) override {
    return answer(context, {kForeverMs, [this]() -> Result<void> {
                              if (store().is_ready(session_->id)) return {};
                              return Error{Errc::no_memory, 0, "a slab is not mapped yet"};
                            }});
  }

  kj::Promise<void> credits(CreditsContext context) override {
    const std::uint32_t pages = context.getParams().getPages();
    const std::uint32_t deadline_ms = context.getParams().getDeadlineMs();
    context.allowCancellation();
    require_open();
    const std::uint64_t asked_ms = sessions_.now_ms();
    auto outcome = sessions_.attempt(
        session_, {deadline_ms, [this, pages] { return store().request_credits(session_->id, pages); },
                   [this] { store().withdraw_credits(session_->id); }});
    return outcome.then([this, context, pages, deadline_ms, asked_ms](Error error) mutable {
      sessions_.note_alloc_wait(sessions_.now_ms() - asked_ms);
      auto results = context.getResults();
      results.setGranted(error.code == Errc::ok ? pages : 0);
      if (error.code == Errc::no_memory) return refuse_for_room(results.initStatus(), pages, deadline_ms);
      set_status(results.initStatus(), error);
    });
  }

  kj::Promise<void> attach(AttachContext context) override {
    require_open();
    const auto params = context.getParams();
    auto results = context.getResults();
    Key key{};
    if (params.getKey().size() != key.size()) {
      set_status(results.initStatus(), Errc::invalid_argument,
                 "a key has 32 bytes, not " + std::to_string(params.getKey().size()));
      return kj::READY_NOW;
    }
    std::copy(params.getKey().begin(), params.getKey().end(), key.begin());
    sessions_.drain_ring(*session_);
    const auto pages = store().attach(session_->id, SequenceId{params.getSequence()}, PageId{params.getLastPage()},
                                      params.getGeneration(), params.getPages(), key, params.getFormatFloorDense(),
                                      sessions_.now_ms());
    sessions_.settle();
    if (!pages) {
      set_status(results.initStatus(), pages.error());
      return kj::READY_NOW;
    }
    set_ok(results.initStatus());
    auto list = results.initPages(static_cast<unsigned>(pages->size()));
    for (unsigned i = 0; i < list.size(); ++i) list.set(i, raw((*pages)[i]));
    return kj::READY_NOW;
  }

  kj::Promise<void> resume(ResumeContext context) override {
    const SequenceId sequence{context.getParams().getSequence()};
    const std::uint64_t asked_ms = sessions_.now_ms();
    return answer(context, {context.getParams().getDeadlineMs(),
                            [this, sequence] { return store().resume(session_->id, sequence, sessions_.now_ms()); }})
        .then([this, asked_ms] { sessions_.note_restore(sessions_.now_ms() - asked_ms); });
  }

  kj::Promise<void> lostPages(LostPagesContext context) override {
    require_open();
    sessions_.drain_ring(*session_);
    std::uint64_t now = 0;
    const auto lost = store().lost_pages(session_->id, context.getParams().getSince(), now);
    sessions_.settle();
    auto results = context.getResults();
    set_ok(results.initStatus());
    results.setNow(now);
    auto pages = results.initPages(static_cast<unsigned>(lost.size()));
    auto sequences = results.initSequences(static_cast<unsigned>(lost.size()));
    for (unsigned i = 0; i < pages.size(); ++i) {
      pages.set(i, raw(lost[i].page));
      sequences.set(i, raw(lost[i].sequence));
    }
    return kj::READY_NOW;
  }

  kj::Promise<void> ping(PingContext) override {
    require_open();
    sessions_.drain_ring(*session_);
    sessions_.settle();
    return kj::READY_NOW;
  }

 private:
  Store& store() { return sessions_.store(); }

  // Only a peer that goes on after its own end gets here (its process has ended, the socket lives in a child).
  void require_open() { KJ_REQUIRE(!session_->closed, "the session has ended"); }

  // A request whose reply is its status alone.
  template <typename Context>
  kj::Promise<void> answer(Context context, Sessions::Request request) {
    context.allowCancellation();
    require_open();
    return sessions_.attempt(session_, std::move(request)).then([context](Error error) mutable {
      set_status(context.getResults().initStatus(), error);
    });
  }

  template <typename Context>
  kj::Promise<void> give(Context context, kj::Maybe<wire::Memory::Client>& memory) {
    require_open();
    context.getResults().setMemory(KJ_ASSERT_NONNULL(memory));
    return kj::READY_NOW;
  }

  void refuse_for_room(wire::Status::Builder status, std::uint32_t pages, std::uint32_t deadline_ms) {
    set_status(status, Errc::no_memory,
               "no room for " + std::to_string(pages) + " pages within " + std::to_string(deadline_ms) +
                   " ms; release or park sequences, wait longer, or raise the tenant's quota or the arena");
  }

  Sessions& sessions_;
  std::shared_ptr<LiveSession> session_;
};

class NodeServer final : public wire::Node::Server {
 public:
  NodeServer(const Devices& devices, const AdminParts& admin, std::shared_ptr<Process> process)
      : devices_(devices), admin_(admin), process_(std::move(process)) {}

  kj::Promise<void> register_(RegisterContext context) override {
    const auto registration = context.getParams().getRequest();
    auto results = context.getResults();
    SessionRequest request;
    if (auto refusal = check_registration(registration, devices_.names(), request)) {
      return refuse(results.initStatus(), refusal->code, refusal->message);
    }
    if (process_->ended) return refuse(results.initStatus(), Errc::stale_id, "the process that connected has ended");
    const SessionId earlier{registration.getResumeSession()};
    const bool resumes = raw(earlier) != 0;
    if (auto refusal = resumes ? std::nullopt : check_count()) {
      return refuse(results.initStatus(), refusal->code, refusal->message);
    }
    ServedDevice& device = devices_.pick(registration.getDevice().cStr(), earlier);
    const auto tenant = device.tenants.choose(process_->peer);
    if (!tenant) {
      return refuse(results.initStatus(), tenant.error().code,
                    describe(tenant.error()) + ": uid " + std::to_string(process_->peer.uid) +
                        "; add it to a [[tenants]] of kvqd's configuration");
    }
    request.tenant = *tenant;
    request.pid = static_cast<std::uint32_t>(process_->peer.pid);
    request.uid = process_->peer.uid;
    kj::Maybe<wire::SlabSink::Client> sink;
    if (request.maps_slabs) sink = registration.getSlabs();
    std::shared_ptr<LiveSession> session;
    if (auto refusal = resumes ? resume(device.sessions, registration, request, kj::mv(sink), session)
                               : open(device.sessions, request, kj::mv(sink), session)) {
      return refuse(results.initStatus(), refusal->code, refusal->message);
    }
    set_ok(results.initStatus());
    fill_info(results.initInfo(), device.sessions, *session);
    results.setSession(kj::heap<SessionServer>(device.sessions, session));
    return kj::READY_NOW;
  }

  kj::Promise<void> devices(DevicesContext context) override {
    const std::vector<std::string> names = devices_.names();
    auto list = context.getResults().initDevices(static_cast<unsigned>(names.size()));
    for (unsigned i = 0; i < list.size(); ++i) list.set(i, names[i]);
    return kj::READY_NOW;
  }

  kj::Promise<void> admin(AdminContext context) override {
    auto results = context.getResults();
    const RpcOptions& options = devices_.options();
    if (!may_administer(process_->peer, options)) {
      std::string who = "root";
      if (options.admin_gid) who += " or a member of group " + options.admin_group;
      return refuse(results.initStatus(), Errc::permission_denied,
                    "only " + who + " may administer kvqd, not uid " + std::to_string(process_->peer.uid));
    }
    if (process_->admins >= options.max_admins_per_peer) {
      devices_.log_refusal(*process_, "admins_of_connection", options.max_admins_per_peer);
      return refuse(results.initStatus(), Errc::limit_reached,
                    "one connection has at most " + std::to_string(options.max_admins_per_peer) +
                        " Admin capabilities; use one that it has");
    }
    set_ok(results.initStatus());
    results.setAdmin(make_admin(admin_, process_));
    return kj::READY_NOW;
  }

 private:
  kj::Promise<void> refuse(wire::Status::Builder status, Errc code, const std::string& message) {
    set_status(status, code, message);
    return kj::READY_NOW;
  }

  // Of sessions, those on all devices together.
  std::optional<Refusal> check_count() {
    const RpcOptions& options = devices_.options();
    if (devices_.of_same_process(process_->peer) >= options.max_sessions_per_peer) {
      devices_.log_refusal(*process_, "sessions_of_process", options.max_sessions_per_peer);
      return Refusal{Errc::limit_reached, "one process has at most " + std::to_string(options.max_sessions_per_peer) +
                                              " models; close one first"};
    }
    if (devices_.sessions() < options.max_sessions) return std::nullopt;
    devices_.log_refusal(*process_, "sessions_in_all", options.max_sessions);
    return Refusal{Errc::limit_reached, "max_sessions are open"};
  }

  std::optional<Refusal> open(Sessions& sessions, const SessionRequest& request, kj::Maybe<wire::SlabSink::Client> sink,
                              std::shared_ptr<LiveSession>& session) {
    auto opened = sessions.open(process_, request, kj::mv(sink));
    if (!opened) {
      if (opened.error().code == Errc::limit_reached) sessions.log_refusal(*process_, "sessions_in_all");
      return Refusal{opened.error().code, describe(opened.error())};
    }
    session = *opened;
    log_peer("session_peer", *session);
    return std::nullopt;
  }

  // A refusal is logged, since somebody may be trying tokens.
  std::optional<Refusal> resume(Sessions& sessions, wire::Registration::Reader registration,
                                const SessionRequest& request, kj::Maybe<wire::SlabSink::Client> sink,
                                std::shared_ptr<LiveSession>& session) {
    const auto bytes = registration.getResumeToken();
    SessionToken token{};
    std::optional<Refusal> refusal;
    if (bytes.size() != token.size()) {
      refusal = Refusal{Errc::permission_denied, "a session's token has 16 bytes, not " + std::to_string(bytes.size())};
    } else {
      std::copy(bytes.begin(), bytes.end(), token.begin());
      refusal =
          sessions.resume(SessionId{registration.getResumeSession()}, token, process_, request, kj::mv(sink), session);
    }
    if (refusal) {
      devices_.options().log("event=resume_refused session=" + std::to_string(registration.getResumeSession()) +
                             " pid=" + std::to_string(process_->peer.pid) +
                             " uid=" + std::to_string(process_->peer.uid) + " reason=\"" + refusal->message + "\"");
      return refusal;
    }
    kill_point(KillPoint::resume_accepted);
    log_peer("session_resumed", *session);
    return std::nullopt;
  }

  void log_peer(const char* event, const LiveSession& session) {
    devices_.options().log(std::string("event=") + event + " session=" + std::to_string(raw(session.id)) +
                           " uid=" + std::to_string(process_->peer.uid) + " label=\"" + session.label + "\"");
  }

  void fill_info(wire::SessionInfo::Builder info, Sessions& sessions, const LiveSession& session) {
    const RpcOptions& options = sessions.options();
    const TenantSpec& tenant = sessions.store().tenant(session.tenant);
    info.setSession(raw(session.id));
    info.setTenant(raw(session.tenant));
    info.setTenantName(tenant.name);
    info.setSalt(kj::arrayPtr(tenant.salt.data(), tenant.salt.size()));
    info.setArenaBytes(options.range_bytes);
    info.setSlabBytes(options.slab_bytes);
    info.setDaemonInstance(sessions.store().status().instance);
    info.setColdFormat(static_cast<std::uint8_t>(options.cold_format));
    info.setDevice(options.device);
    info.setDeviceUuid(options.device_uuid);
    info.setMirrorBytes(options.mirror_bytes);
  }

  const Devices& devices_;
  const AdminParts& admin_;
  std::shared_ptr<Process> process_;
};

}  // namespace

wire::Node::Client make_node(const Devices& devices, const AdminParts& admin, std::shared_ptr<Process> process) {
  return kj::heap<NodeServer>(devices, admin, std::move(process));
}

}  // namespace kvq
