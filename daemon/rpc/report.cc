// Store snapshots as JSON.
#include "daemon/rpc/report.h"

#include "kvq/result.h"

namespace kvq {
namespace {

using Json = nlohmann::ordered_json;

std::string tenant_name(const StoreStatus& status, TenantId id) {
  for (const TenantStatus& tenant : status.tenants) {
    if (tenant.id == id) return tenant.name;
  }
  return "";
}

Json report_tenant(const TenantStatus& t) {
  Json formats = Json::object();
  for (std::uint32_t f = 1; f < kFormatCount; ++f) {
    formats[format_name(static_cast<Format>(f))] = {{"pages", t.format[f].pages}, {"bytes", t.format[f].bytes}};
  }
  return {{"id", raw(t.id)},
          {"name", t.name},
          {"level", level_name(t.level)},
          {"quota_bytes", t.quota_bytes},
          {"share", t.share},
          {"sessions", t.sessions},
          {"slab_bytes", t.slab_bytes},
          {"page_bytes", t.page_bytes},
          {"limbo_bytes", t.limbo_bytes},
          {"free_bytes", t.free_bytes},
          {"open_pages", t.open_pages},
          {"sealed_pages", t.sealed_pages},
          {"cached_pages", t.cached_pages},
          {"formats", formats},
          {"lookups", t.counts.lookups},
          {"hit_pages", t.counts.all_hit_pages()},
          {"computed_pages", t.counts.sealed_pages}};
}

}  // namespace

const char* format_name(Format format) {
  switch (format) {
    case Format::none:
      return "none";
    case Format::dense:
      return "dense";
    case Format::int4:
      return "int4";
    case Format::int4_k4:
      return "int4_k4";
    case Format::int4_k8:
      return "int4_k8";
    case Format::k8v4:
      return "k8v4";
  }
  KVQ_ASSERT(false);
  return "";
}

Json report_watermarks(const Watermarks& w) {
  return {{"quantize_at", w.quantize_at}, {"evict_at", w.evict_at}, {"refuse_at", w.refuse_at}, {"relief", w.relief}};
}

Json report_tenants(const StoreStatus& status) {
  Json tenants = Json::array();
  for (const TenantStatus& tenant : status.tenants) tenants.push_back(report_tenant(tenant));
  return tenants;
}

Json report_status(const StoreStatus& s) {
  return {{"level", level_name(s.level)},
          {"draining", s.draining},
          {"arena",
           {{"bytes", s.arena_bytes},
            {"target_bytes", s.target_bytes},
            {"start_bytes", s.start_bytes},
            {"most_bytes", s.most_bytes},
            {"slab_bytes", s.slab_bytes},
            {"slabs", s.slabs},
            {"slabs_used", s.slabs - s.slabs_free},
            {"slabs_free", s.slabs_free},
            {"slabs_reserved", s.slabs_reserved},
            {"slabs_over", s.slabs_over}}},
          {"watermarks", report_watermarks(s.watermarks)},
          {"transcodes",
           {{"done", s.counts.all_transcodes()},
            {"failed", s.counts.transcode_failures},
            {"bytes", s.counts.transcode_bytes},
            {"in_flight", s.transcodes_in_flight}}},
          {"dropped_pages", s.counts.drops},
          {"refusals", s.counts.refusals},
          {"limbo_slots", s.limbo_slots},
          {"verify",
           {{"running", s.verify.running},
            {"pages_total", s.verify.pages_total},
            {"pages_done", s.verify.pages_done},
            {"pages_bad", s.verify.pages_bad},
            {"passes", s.verify.passes},
            {"pages_bad_ever", s.verify.pages_bad_ever}}},
          {"device_health",
           {{"state", s.device.degraded ? "degraded" : "ok"},
            {"text", s.device.text},
            {"uuid", s.device.uuid},
            {"export", s.device.exporter},
            {"worker_restarts", s.device.restarts},
            {"held_bytes", s.device.held_bytes},
            {"overhead_bytes", s.device.overhead_bytes}}},
          {"adopt",
           {{"adopted", s.adopt.adopted},
            {"refused", s.adopt.refused},
            {"sessions", s.adopt.sessions},
            {"sequences", s.adopt.sequences},
            {"slabs", s.adopt.slabs},
            {"pages", s.adopt.pages},
            {"undone_bytes", s.adopt.undone_bytes}}},
          {"tenants", report_tenants(s)}};
}

Json report_sessions(const std::vector<SessionStatus>& sessions, const StoreStatus& status,
                     std::uint64_t step_deadline_ms) {
  Json list = Json::array();
  for (const SessionStatus& s : sessions) {
    list.push_back({{"id", raw(s.id)},
                    {"tenant", tenant_name(status, s.tenant)},
                    {"pid", s.pid},
                    {"label", s.label},
                    {"connected", s.connected},
                    {"waits_for_client", s.waits_for_client},
                    {"evicted", s.evicted},
                    {"hung", s.oldest_step_ms > step_deadline_ms},
                    {"ready", s.ready},
                    {"sequences", s.sequences},
                    {"running", s.running},
                    {"pages", s.pages},
                    {"credits", s.credits},
                    {"credits_target", s.credits_target},
                    {"open_steps", s.open_steps},
                    {"oldest_step_epochs", s.oldest_step_epochs},
                    {"oldest_step_ms", s.oldest_step_ms},
                    {"limbo_bytes", s.limbo_bytes},
                    {"lost_pages", s.lost_pages},
                    {"commands_refused", s.commands_refused}});
  }
  return list;
}

Json report_pages(const std::vector<PageStatus>& pages, const StoreStatus& status) {
  Json list = Json::array();
  for (const PageStatus& p : pages) {
    list.push_back({{"tenant", tenant_name(status, p.tenant)},
                    {"page", raw(p.page)},
                    {"generation", p.generation},
                    {"format", format_name(p.format)},
                    {"state", p.state},
                    {"slab", raw(p.slab)},
                    {"slot", p.slot},
                    {"references", p.references},
                    {"idle_ms", p.idle_ms},
                    {"indexed", p.indexed},
                    {"stays_dense", p.stays_dense}});
  }
  return list;
}

Json report_verify(const VerifyStatus& verify, const std::string& tenant) {
  return {{"tenant", tenant},           {"finished", !verify.running},
          {"pages", verify.pages_done}, {"pages_total", verify.pages_total},
          {"bad", verify.pages_bad},    {"bad_ever", verify.pages_bad_ever}};
}

Json report_quantize(const QuantizeReport& report, bool dry_run) {
  return {{"dry_run", dry_run},
          {"pages", report.pages},
          {"bytes_before", report.bytes_before},
          {"bytes_after", report.bytes_after}};
}

}  // namespace kvq
