// Admin: reports and settings. Each call asks the store once; a refused setting changes nothing.
#include "daemon/rpc/admin.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "daemon/rpc/report.h"
#include "daemon/rpc/setting.h"

#ifndef KVQ_VERSION
#error "KVQ_VERSION comes from the project's version"
#endif

namespace kvq {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint32_t kDefaultPages = 100;
constexpr std::uint32_t kMostPages = 10'000;  // of one reply
constexpr std::size_t kVerifiesAtOnce = 16;   // calls that wait for one

kj::String text(const Json& json) {
  // A name from a configuration file may hold any bytes: what is not UTF-8 is replaced, never thrown.
  return kj::heapString(json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

std::string hex(std::uint64_t value) {
  char out[17];
  std::snprintf(out, sizeof(out), "%016llx", static_cast<unsigned long long>(value));
  return out;
}

class AdminServer final : public wire::Admin::Server {
 public:
  AdminServer(const AdminParts& parts, std::shared_ptr<Process> process) : parts_(parts), process_(std::move(process)) {
    ++process_->admins;
  }
  ~AdminServer() noexcept(false) { --process_->admins; }

  kj::Promise<void> status(StatusContext context) override {
    const RpcOptions& options = parts_.sessions.options();
    Json out = {{"version", KVQ_VERSION},
                {"contract_version", kContractVersion},
                {"pid", ::getpid()},
                {"uptime_ms", parts_.sessions.now_ms() - parts_.started_ms},
                {"instance", hex(store().status().instance)},
                {"device", options.device},
                {"cold_format", format_name(options.cold_format)},
                {"connections", parts_.connections()},
                {"sessions", parts_.sessions.size()},
                {"parked_requests", parts_.sessions.parked()},
                {"ticks", parts_.sessions.ticker().ticks()}};
    out.update(report_status(store().status()));
    context.getResults().setJson(text(out));
    return kj::READY_NOW;
  }

  kj::Promise<void> sessions(SessionsContext context) override {
    const std::uint64_t deadline_ms = parts_.sessions.options().step_deadline_ms;
    context.getResults().setJson(
        text({{"step_deadline_ms", deadline_ms},
              {"sessions", report_sessions(store().sessions(), store().status(), deadline_ms)}}));
    return kj::READY_NOW;
  }

  kj::Promise<void> tenants(TenantsContext context) override {
    context.getResults().setJson(text({{"tenants", report_tenants(store().status())}}));
    return kj::READY_NOW;
  }

  kj::Promise<void> pages(PagesContext context) override {
    auto results = context.getResults();
    const auto params = context.getParams();
    const StoreStatus status = store().status();
    std::optional<TenantId> only;
    if (!pick_tenant(params.getTenant(), only, results.initStatus())) return kj::READY_NOW;
    std::uint32_t limit = params.getLimit() == 0 ? kDefaultPages : std::min(params.getLimit(), kMostPages);
    std::vector<PageStatus> pages;
    for (const TenantStatus& tenant : status.tenants) {
      if (only && tenant.id != *only) continue;
      const auto more =
          store().pages(tenant.id, limit - static_cast<std::uint32_t>(pages.size()), parts_.sessions.now_ms());
      pages.insert(pages.end(), more.begin(), more.end());
      if (pages.size() >= limit) break;
    }
    results.setJson(text({{"limit", limit}, {"pages", report_pages(pages, status)}}));
    return kj::READY_NOW;
  }

  kj::Promise<void> quantize(QuantizeContext context) override {
    auto results = context.getResults();
    const auto params = context.getParams();
    std::optional<TenantId> only;
    if (!pick_tenant(params.getTenant(), only, results.initStatus())) return kj::READY_NOW;
    const bool dry_run = params.getDryRun();
    const QuantizeReport report = store().quantize(only, params.getIdleMs(), dry_run, parts_.sessions.now_ms());
    if (!dry_run) {
      parts_.sessions.options().log("event=quantize_asked pages=" + std::to_string(report.pages) +
                                    " idle_ms=" + std::to_string(params.getIdleMs()));
    }
    parts_.sessions.settle();
    parts_.sessions.ticker().soon();
    results.setJson(text(report_quantize(report, dry_run)));
    return kj::READY_NOW;
  }

  kj::Promise<void> set(SetContext context) override {
    auto results = context.getResults();
    const std::string key = context.getParams().getKey().cStr();
    const std::string value = context.getParams().getValue().cStr();
    Json changed;
    if (auto refusal = change_setting(store(), key, value, changed)) {
      set_status(results.initStatus(), refusal->code, refusal->message);
      return kj::READY_NOW;
    }
    parts_.sessions.options().log("event=set key=" + printable(key, 80) + " value=" + printable(value, 80));
    parts_.sessions.settle();
    parts_.sessions.ticker().soon();
    set_ok(results.initStatus());
    results.setJson(text(changed));
    return kj::READY_NOW;
  }

  kj::Promise<void> drain(DrainContext context) override {
    context.allowCancellation();  // the drain goes on without its caller
    return parts_.sessions.drain(context.getParams().getDeadlineMs()).then([this, context]() mutable {
      auto results = context.getResults();
      set_ok(results.initStatus());
      results.setJson(text({{"draining", true}, {"sessions_left", parts_.sessions.size()}}));
    });
  }

  kj::Promise<void> evictSession(EvictSessionContext context) override {
    auto results = context.getResults();
    const SessionId id{context.getParams().getSession()};
    const bool kill = context.getParams().getKill();
    pid_t pid = 0;
    const auto refusal = parts_.sessions.evict(id, kill, pid);
    if (refusal) {
      set_status(results.initStatus(), refusal->code, refusal->message);
    } else {
      set_ok(results.initStatus());
    }
    if (refusal && refusal->code == Errc::stale_id) return kj::READY_NOW;  // else only the kill failed
    parts_.sessions.options().log("event=session_evicted session=" + std::to_string(raw(id)) +
                                  " pid=" + std::to_string(pid) + " killed=" + (kill && !refusal ? "yes" : "no") +
                                  " by_uid=" + std::to_string(process_->peer.uid));
    results.setJson(text({{"session", raw(id)}, {"pid", pid}, {"evicted", true}, {"killed", kill && !refusal}}));
    return kj::READY_NOW;
  }

  kj::Promise<void> verify(VerifyContext context) override {
    context.allowCancellation();  // the pass goes on without its caller
    const auto params = context.getParams();
    std::optional<TenantId> only;
    if (!pick_tenant(params.getTenant(), only, context.getResults().initStatus())) return kj::READY_NOW;
    if (parts_.sessions.verifying() >= kVerifiesAtOnce) {
      parts_.sessions.log_refusal(*process_, "verifies", kVerifiesAtOnce);
      set_status(context.getResults().initStatus(), Errc::limit_reached,
                 "too many wait for a verification already; kvqctl status shows how far it is");
      return kj::READY_NOW;
    }
    const std::string tenant = params.getTenant().cStr();
    return parts_.sessions.verify(only, params.getDeadlineMs()).then([this, context, tenant]() mutable {
      context.getResults().setJson(text(report_verify(store().status().verify, tenant)));
    });
  }

 private:
  Store& store() { return parts_.sessions.store(); }

  // Empty: all tenants. An unknown name fills `status` and returns false.
  bool pick_tenant(capnp::Text::Reader name, std::optional<TenantId>& only, wire::Status::Builder status) {
    set_ok(status);
    if (name.size() == 0) return true;
    only = store().find_tenant(name.cStr());
    if (only) return true;
    set_status(status, Errc::invalid_argument, unknown_tenant(store(), name.cStr()));
    return false;
  }

  const AdminParts& parts_;
  const std::shared_ptr<Process> process_;
};

}  // namespace

wire::Admin::Client make_admin(const AdminParts& parts, std::shared_ptr<Process> process) {
  return kj::heap<AdminServer>(parts, std::move(process));
}

}  // namespace kvq
