// Each store's list, put together and cut again.
#include "daemon/rpc/lists.h"

#include <algorithm>

#include "daemon/rpc/reply.h"
#include "daemon/rpc/report.h"
#include "daemon/rpc/wire.h"

namespace kvq {
namespace {

using Json = nlohmann::ordered_json;

std::uint32_t limit_of(std::uint32_t asked) {
  constexpr std::uint32_t kDefault = 100;
  return asked == 0 ? kDefault : std::min(asked, kMostListed);
}

std::string tenant_name(ServedDevice& device, TenantId id) { return device.sessions.store().tenant(id).name; }

Json report_formats(const FormatUse (&format)[kFormatCount]) {
  Json out = Json::object();
  for (std::size_t f = 1; f < kFormatCount; ++f) {
    out[format_name(static_cast<Format>(f))] = {{"pages", format[f].pages}, {"bytes", format[f].bytes}};
  }
  return out;
}

Json report_sequence(const SequenceStatus& s, ServedDevice& device) {
  return {{"session", raw(s.session)},
          {"tenant", tenant_name(device, s.tenant)},
          {"sequence", raw(s.sequence)},
          {"state", s.running ? "running" : "parked"},
          {"pages", s.pages},
          {"tokens", s.tokens},
          {"formats", report_formats(s.format)},
          {"shared_pages", s.shared_pages},
          {"lost_pages", s.lost_pages},
          {"idle_ms", s.idle_ms}};
}

Json report_chain(const ChainStatus& c, ServedDevice& device) {
  return {{"tenant", tenant_name(device, c.tenant)},
          {"page", raw(c.page)},
          {"generation", c.generation},
          {"pages", c.pages},
          {"tokens", c.pages * kPageTokens},
          {"formats", report_formats(c.format)},
          {"sequences", c.references},
          {"idle_ms", c.idle_ms}};
}

// The hit rate is of tokens: what came from the cache, of that and what was computed and completed.
Json report_prefix_use(const PrefixUse& use, const TenantStatus& tenant) {
  Json formats = Json::object();
  std::uint64_t entries = 0, cached = 0;
  for (std::size_t f = 1; f < kFormatCount; ++f) {
    entries += use.indexed[f];
    cached += use.cached[f];
    formats[format_name(static_cast<Format>(f))] = {{"pages", use.indexed[f]},
                                                    {"tokens", use.indexed[f] * kPageTokens},
                                                    {"cached_pages", use.cached[f]},
                                                    {"hit_tokens", tenant.counts.hit_pages[f] * kPageTokens}};
  }
  const std::uint64_t hit = tenant.counts.all_hit_pages(), all = hit + tenant.counts.sealed_pages;
  return {{"tenant", tenant.name},
          {"entries", entries},
          {"capacity", use.capacity},
          {"cached_pages", cached},
          {"formats", formats},
          {"attaches", tenant.counts.lookups},
          {"attaches_met", tenant.counts.hits},
          {"hit_tokens", hit * kPageTokens},
          {"computed_tokens", tenant.counts.sealed_pages * kPageTokens},
          {"hit_rate", all == 0 ? 0.0 : static_cast<double>(hit) / static_cast<double>(all)}};
}

bool has_session(const Devices& devices, SessionId id) {
  return std::any_of(devices.begin(), devices.end(), [id](const auto& device) {
    const auto sessions = device->sessions.store().sessions();
    return std::any_of(sessions.begin(), sessions.end(), [id](const SessionStatus& s) { return s.id == id; });
  });
}

// The first `limit` of lists that each have the greatest `key` first.
void keep_first(Json& list, const char* key, std::uint32_t limit) {
  std::stable_sort(list.begin(), list.end(), [key](const Json& a, const Json& b) { return a.at(key) > b.at(key); });
  if (list.size() > limit) list.erase(list.begin() + limit, list.end());
}

}  // namespace

kj::Promise<void> list_sequences(
    const Devices& devices, capnp::CallContext<wire::Admin::SequencesParams, wire::Admin::SequencesResults> context) {
  auto results = context.getResults();
  const auto params = context.getParams();
  Where where;
  if (!find_where(devices, params.getTenant().cStr(), params.getDevice().cStr(), where, results.initStatus())) {
    return kj::READY_NOW;
  }
  const SessionId session{params.getSession()};
  if (session != SessionId{} && !has_session(devices, session)) {
    set_status(results.initStatus(), Errc::invalid_argument,
               "there is no session " + std::to_string(raw(session)) + "; kvqctl sessions lists them");
    return kj::READY_NOW;
  }
  const std::uint32_t limit = limit_of(params.getLimit());
  std::uint64_t total = 0;
  Json list = Json::array();
  for (const auto& [device, only] : where) {
    Sessions& sessions = device->sessions;
    const SequenceList of_store = sessions.store().sequences(only, session, limit, sessions.now_ms());
    total += of_store.total;
    Json more = Json::array();
    for (const SequenceStatus& s : of_store.longest) more.push_back(report_sequence(s, *device));
    append(list, more, *device);
  }
  keep_first(list, "pages", limit);
  results.setJson(json_text({{"limit", limit}, {"total", total}, {"sequences", list}}));
  return kj::READY_NOW;
}

kj::Promise<void> list_prefix(const Devices& devices,
                              capnp::CallContext<wire::Admin::PrefixParams, wire::Admin::PrefixResults> context) {
  auto results = context.getResults();
  const auto params = context.getParams();
  Where where;
  if (!find_where(devices, params.getTenant().cStr(), params.getDevice().cStr(), where, results.initStatus())) {
    return kj::READY_NOW;
  }
  const std::uint32_t limit = limit_of(params.getLimit());
  bool complete = true;
  Json tenants = Json::array(), chains = Json::array();
  for (const auto& [device, only] : where) {
    Sessions& sessions = device->sessions;
    const PrefixStatus of_store = sessions.store().prefix(only, limit, sessions.now_ms());
    const StoreStatus status = sessions.store().status();
    complete = complete && of_store.complete;
    Json sums = Json::array(), more = Json::array();
    for (const PrefixUse& use : of_store.tenants) {
      sums.push_back(report_prefix_use(use, status.tenants.at(raw(use.tenant) - 1)));
    }
    for (const ChainStatus& c : of_store.chains) more.push_back(report_chain(c, *device));
    append(tenants, sums, *device);
    append(chains, more, *device);
  }
  keep_first(chains, "idle_ms", limit);
  results.setJson(json_text({{"limit", limit}, {"complete", complete}, {"tenants", tenants}, {"chains", chains}}));
  return kj::READY_NOW;
}

}  // namespace kvq
