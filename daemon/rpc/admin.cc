// Admin: reports and settings. Each call asks each store once; a refused setting changes nothing.
#include "daemon/rpc/admin.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "daemon/rpc/admin_room.h"
#include "daemon/rpc/event_report.h"
#include "daemon/rpc/lists.h"
#include "daemon/rpc/reply.h"
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

kj::String text(const Json& json) { return json_text(json); }

std::string hex(std::uint64_t value) {
  char out[17];
  std::snprintf(out, sizeof(out), "%016llx", static_cast<unsigned long long>(value));
  return out;
}

// One pass over several devices is finished when all are.
void add(VerifyStatus& sum, const VerifyStatus& more) {
  sum.pages_total += more.pages_total;
  sum.pages_done += more.pages_done;
  sum.pages_bad += more.pages_bad;
  sum.pages_bad_ever += more.pages_bad_ever;
  sum.running = sum.running || more.running;
}

class AdminServer final : public wire::Admin::Server {
 public:
  AdminServer(const AdminParts& parts, std::shared_ptr<Process> process) : parts_(parts), process_(std::move(process)) {
    ++process_->admins;
  }
  ~AdminServer() noexcept(false) { --process_->admins; }

  kj::Promise<void> status(StatusContext context) override {
    const RpcOptions& options = parts_.devices.options();
    Json out = {{"version", KVQ_VERSION},
                {"contract_version", kContractVersion},
                {"pid", ::getpid()},
                {"uptime_ms", parts_.devices.now_ms() - parts_.started_ms},
                {"cold_format", format_name(options.cold_format)},
                {"connections", parts_.connections()},
                {"not_served", Json::array()}};
    out.update(configuration());
    for (const DeviceAbsent& absent : options.not_served) {
      out["not_served"].push_back({{"uuid", absent.uuid}, {"text", absent.why}});
    }
    if (!parts_.devices.several()) {
      out.update(of_device(parts_.devices.at(0)));
    } else {
      out.update({{"sessions", parts_.devices.sessions()}, {"parked_requests", parts_.devices.parked()}});
      for (const auto& device : parts_.devices) {
        out["devices"].push_back({{"name", device->name()}});
        out["devices"].back().update(of_device(*device));
      }
    }
    context.getResults().setJson(text(out));
    return kj::READY_NOW;
  }

  kj::Promise<void> sessions(SessionsContext context) override {
    const std::uint64_t deadline_ms = parts_.devices.options().step_deadline_ms;
    Json list = Json::array();
    for (const auto& device : parts_.devices) {
      const Store& store = device->sessions.store();
      append(list, report_sessions(store.sessions(), store.status(), deadline_ms), *device);
    }
    context.getResults().setJson(text({{"step_deadline_ms", deadline_ms}, {"sessions", list}}));
    return kj::READY_NOW;
  }

  kj::Promise<void> tenants(TenantsContext context) override {
    Json list = Json::array();
    for (const auto& device : parts_.devices) {
      append(list, report_tenants(device->sessions.store().status()), *device);
    }
    context.getResults().setJson(text({{"tenants", list}}));
    return kj::READY_NOW;
  }

  kj::Promise<void> pages(PagesContext context) override {
    auto results = context.getResults();
    const auto params = context.getParams();
    Where where;
    if (!find_where(parts_.devices, params.getTenant().cStr(), params.getDevice().cStr(), where,
                    results.initStatus())) {
      return kj::READY_NOW;
    }
    const std::uint32_t limit = params.getLimit() == 0 ? kDefaultPages : std::min(params.getLimit(), kMostPages);
    Json list = Json::array();
    for (const auto& [device, only] : where) {
      append(list, pages_of(*device, only, limit - static_cast<std::uint32_t>(list.size())), *device);
    }
    results.setJson(text({{"limit", limit}, {"pages", list}}));
    return kj::READY_NOW;
  }

  kj::Promise<void> sequences(SequencesContext context) override { return list_sequences(parts_.devices, context); }

  kj::Promise<void> prefix(PrefixContext context) override { return list_prefix(parts_.devices, context); }

  kj::Promise<void> events(EventsContext context) override {
    const auto params = context.getParams();
    const RpcOptions& options = parts_.devices.options();
    Json out = {{"pid", ::getpid()}};
    const EventRing none;
    const EventRing& ring = options.events != nullptr ? *options.events : none;
    out.update(report_events(ring, params.getAfter(), params.getLimit(), parts_.devices.now_ms()));
    context.getResults().setJson(text(out));
    return kj::READY_NOW;
  }

  kj::Promise<void> quantize(QuantizeContext context) override {
    auto results = context.getResults();
    const auto params = context.getParams();
    Where where;
    if (!find(params.getTenant().cStr(), where, results.initStatus())) return kj::READY_NOW;
    const bool dry_run = params.getDryRun();
    QuantizeReport sum;
    for (const auto& [device, only] : where) {
      Sessions& sessions = device->sessions;
      const auto report = sessions.store().quantize(only, params.getIdleMs(), dry_run, sessions.now_ms());
      sum.pages += report.pages;
      sum.bytes_before += report.bytes_before;
      sum.bytes_after += report.bytes_after;
      sessions.settle();
      sessions.ticker().soon();
    }
    if (!dry_run) {
      parts_.devices.options().log("event=quantize_asked pages=" + std::to_string(sum.pages) +
                                   " idle_ms=" + std::to_string(params.getIdleMs()));
    }
    results.setJson(text(report_quantize(sum, dry_run)));
    return kj::READY_NOW;
  }

  kj::Promise<void> evict(EvictContext context) override {
    auto results = context.getResults();
    const auto params = context.getParams();
    Where where;
    if (!find(params.getTenant().cStr(), where, results.initStatus())) return kj::READY_NOW;
    results.setJson(text(evict_cached(parts_.devices, where, params.getIdleMs(), params.getDryRun())));
    return kj::READY_NOW;
  }

  kj::Promise<void> compact(CompactContext context) override {
    auto results = context.getResults();
    const auto params = context.getParams();
    Where where;
    if (!find(params.getTenant().cStr(), where, results.initStatus())) return kj::READY_NOW;
    results.setJson(text(compact_slabs(parts_.devices, where, params.getDryRun())));
    return kj::READY_NOW;
  }

  kj::Promise<void> resize(ResizeContext context) override {
    auto results = context.getResults();
    const auto params = context.getParams();
    Json report;
    const auto refusal =
        resize_arenas(parts_.devices, params.getDevice().cStr(), params.getArenaBytes(), params.getDryRun(), report);
    if (refusal) {
      set_status(results.initStatus(), refusal->code, refusal->message);
      return kj::READY_NOW;
    }
    set_ok(results.initStatus());
    results.setJson(text(report));
    return kj::READY_NOW;
  }

  // Watermarks are the same in all stores; a tenant is changed wherever it is.
  kj::Promise<void> set(SetContext context) override {
    auto results = context.getResults();
    const std::string key = context.getParams().getKey().cStr();
    const std::string value = context.getParams().getValue().cStr();
    const bool dry_run = context.getParams().getDryRun();
    const bool of_tenant = names_tenant(key);
    Where where;
    if (!find(of_tenant ? key.substr(key.find('.') + 1) : "", where, results.initStatus())) return kj::READY_NOW;
    Json changed;
    std::optional<Refusal> refusal;
    for (const bool checks : {true, false}) {  // all stores take it, or none is changed
      for (const auto& [device, only] : where) {
        if (refusal || (dry_run && !checks)) break;
        refusal = change_setting(device->sessions.store(), key, value, checks, changed);
      }
    }
    if (refusal) {
      set_status(results.initStatus(), refusal->code, refusal->message);
      return kj::READY_NOW;
    }
    changed["dry_run"] = dry_run;
    results.setJson(text(changed));
    if (dry_run) return kj::READY_NOW;
    Configured* configured = parts_.devices.options().configured;
    if (context.getParams().getSaved() && configured != nullptr) {
      note_saved(*configured, where.front().first->sessions.store(), key);
    }
    parts_.devices.options().log("event=set key=" + printable(key, 80) + " value=" + printable(value, 80));
    for (const auto& [device, only] : where) {
      device->sessions.settle();
      device->sessions.ticker().soon();
    }
    return kj::READY_NOW;
  }

  kj::Promise<void> drain(DrainContext context) override {
    context.allowCancellation();  // the drain goes on without its caller
    return parts_.devices.drain(context.getParams().getDeadlineMs()).then([this, context]() mutable {
      auto results = context.getResults();
      set_ok(results.initStatus());
      results.setJson(text({{"draining", true}, {"sessions_left", parts_.devices.sessions()}}));
    });
  }

  kj::Promise<void> evictSession(EvictSessionContext context) override {
    auto results = context.getResults();
    const SessionId id{context.getParams().getSession()};
    const bool kill = context.getParams().getKill();
    pid_t pid = 0;
    const auto refusal = parts_.devices.pick("", id).sessions.evict(id, kill, pid);
    if (refusal) {
      set_status(results.initStatus(), refusal->code, refusal->message);
    } else {
      set_ok(results.initStatus());
    }
    if (refusal && refusal->code == Errc::stale_id) return kj::READY_NOW;  // else only the kill failed
    parts_.devices.options().log("event=session_evicted session=" + std::to_string(raw(id)) +
                                 " pid=" + std::to_string(pid) + " killed=" + (kill && !refusal ? "yes" : "no") +
                                 " by_uid=" + std::to_string(process_->peer.uid));
    results.setJson(text({{"session", raw(id)}, {"pid", pid}, {"evicted", true}, {"killed", kill && !refusal}}));
    return kj::READY_NOW;
  }

  kj::Promise<void> verify(VerifyContext context) override {
    context.allowCancellation();  // the pass goes on without its caller
    const auto params = context.getParams();
    Where where;
    if (!find(params.getTenant().cStr(), where, context.getResults().initStatus())) return kj::READY_NOW;
    kj::Vector<kj::Promise<void>> passes;
    for (const auto& [device, only] : where) {
      if (device->sessions.verifying() < kVerifiesAtOnce) continue;
      parts_.devices.log_refusal(*process_, "verifies", kVerifiesAtOnce);
      set_status(context.getResults().initStatus(), Errc::limit_reached,
                 "too many wait for a verification already; kvqctl status shows how far it is");
      return kj::READY_NOW;
    }
    for (const auto& [device, only] : where) passes.add(device->sessions.verify(only, params.getDeadlineMs()));
    const std::string tenant = params.getTenant().cStr();
    return kj::joinPromises(passes.releaseAsArray()).then([where, context, tenant]() mutable {
      VerifyStatus sum;
      for (const auto& [device, only] : where) add(sum, device->sessions.store().status().verify);
      context.getResults().setJson(text(report_verify(sum, tenant)));
    });
  }

 private:
  Json configuration() const {
    const Configured* configured = parts_.devices.options().configured;
    std::vector<const Store*> stores;
    for (const auto& device : parts_.devices) stores.push_back(&device->sessions.store());
    return {{"config_file", configured != nullptr ? configured->file : ""},
            {"command_line", configured != nullptr ? Json(configured->command_line) : Json::array()},
            {"settings", report_settings(stores, configured)}};
  }

  static Json of_device(ServedDevice& device) {
    const DeviceReport report = device.report();
    Json out = {{"instance", hex(report.store.instance)},
                {"device", device.options.device},
                {"sessions", report.sessions},
                {"parked_requests", report.parked},
                {"ticks", report.ticks}};
    out.update(report_status(report.store));
    return out;
  }

  static Json pages_of(ServedDevice& device, std::optional<TenantId> only, std::uint32_t limit) {
    const Store& store = device.sessions.store();
    const StoreStatus status = store.status();
    std::vector<PageStatus> pages;
    for (const TenantStatus& tenant : status.tenants) {
      if (pages.size() >= limit) break;
      if (only && tenant.id != *only) continue;
      const auto more =
          store.pages(tenant.id, limit - static_cast<std::uint32_t>(pages.size()), device.sessions.now_ms());
      pages.insert(pages.end(), more.begin(), more.end());
    }
    return report_pages(pages, status);
  }

  // Empty: all tenants of all devices. A name that none has fills `status` and returns false.
  bool find(const std::string& name, Where& where, wire::Status::Builder status) {
    return find_where(parts_.devices, name, "", where, status);
  }

  const AdminParts& parts_;
  const std::shared_ptr<Process> process_;
};

}  // namespace

wire::Admin::Client make_admin(const AdminParts& parts, std::shared_ptr<Process> process) {
  return kj::heap<AdminServer>(parts, std::move(process));
}

}  // namespace kvq
