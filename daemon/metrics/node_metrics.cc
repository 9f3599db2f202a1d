// One call of each() per family: name, kind, help, and what one device or tenant adds to it.
#include "daemon/metrics/node_metrics.h"

#include <algorithm>

#include "daemon/metrics/exposition.h"

#ifndef KVQ_VERSION
#error "KVQ_VERSION comes from the project's version"
#endif

namespace kvq {
namespace {

constexpr std::string_view kFormats[kFormatCount] = {"none", "dense", "int4", "int4_k4", "int4_k8", "k8v4"};
constexpr auto kCounter = MetricKind::counter;
constexpr auto kGauge = MetricKind::gauge;
constexpr auto kHistogram = MetricKind::histogram;

class Writer {
 public:
  explicit Writer(const NodeReport& report) : report_(report) {}

  template <typename Add>
  void of_devices(std::string_view name, MetricKind kind, std::string_view help, Add add) {
    out.family(name, kind, help);
    for (const DeviceReport& d : report_.devices) add(d, Labels{{"device", d.name}});
  }

  // A tenant that no setting names any more goes once it holds nothing.
  template <typename Add>
  void of_tenants(std::string_view name, MetricKind kind, std::string_view help, Add add) {
    of_devices(name, kind, help, [&](const DeviceReport& d, const Labels& device) {
      for (const TenantStatus& t : d.store.tenants) {
        if (!t.configured && t.sessions == 0 && t.slab_bytes == 0) continue;
        add(t, with(device, "tenant", t.name), d.store);
      }
    });
  }

  // Of one value each.
  template <typename Get>
  void device(std::string_view name, MetricKind kind, std::string_view help, Get get) {
    of_devices(name, kind, help, [&](const DeviceReport& d, const Labels& l) { out.sample(l, get(d)); });
  }
  template <typename Get>
  void tenant(std::string_view name, MetricKind kind, std::string_view help, Get get) {
    of_tenants(name, kind, help,
               [&](const TenantStatus& t, const Labels& l, const StoreStatus&) { out.sample(l, get(t)); });
  }

  static Labels with(Labels labels, std::string_view key, std::string_view value) {
    labels.emplace_back(key, value);
    return labels;
  }

  Exposition out;

 private:
  const NodeReport& report_;
};

// Free slabs that only transcodes may take.
std::uint64_t reserve_bytes(const StoreStatus& s) { return std::min(s.slabs_reserved, s.slabs_free) * s.slab_bytes; }

void write_memory(Writer& w) {
  w.device("kvq_arena_bytes", kGauge, "Memory for all pages of the device.",
           [](const DeviceReport& d) { return d.store.arena_bytes; });
  w.device("kvq_arena_target_bytes", kGauge, "What the arena is to be: less than it is while it shrinks.",
           [](const DeviceReport& d) { return d.store.target_bytes; });
  w.device("kvq_slab_bytes", kGauge, "Unit in which tenants get memory.",
           [](const DeviceReport& d) { return d.store.slab_bytes; });
  w.of_devices(
      "kvq_memory_bytes", kGauge,
      "The arena by use; the kinds sum to kvq_arena_bytes. Pages by format, limbo (given up, still readable by "
      "an open step), slack (free places in tenants' slabs), reserve (for transcodes alone), free.",
      [&](const DeviceReport& d, const Labels& l) {
        const StoreStatus& s = d.store;
        std::uint64_t pages[kFormatCount] = {}, limbo = 0, slack = 0;
        for (const TenantStatus& t : s.tenants) {
          for (std::size_t f = 1; f < kFormatCount; ++f) pages[f] += t.format[f].bytes;
          limbo += t.limbo_bytes;
          slack += t.free_bytes;
        }
        for (std::size_t f = 1; f < kFormatCount; ++f) w.out.sample(w.with(l, "kind", kFormats[f]), pages[f]);
        w.out.sample(w.with(l, "kind", "limbo"), limbo);
        w.out.sample(w.with(l, "kind", "slack"), slack);
        w.out.sample(w.with(l, "kind", "reserve"), reserve_bytes(s));
        w.out.sample(w.with(l, "kind", "free"), s.slabs_free * s.slab_bytes - reserve_bytes(s));
      });
  w.device("kvq_device_held_bytes", kGauge, "GPU memory of slabs, spare slabs and mirrors; 0 on the host.",
           [](const DeviceReport& d) { return d.store.device.held_bytes; });
  w.device("kvq_device_overhead_bytes", kGauge, "GPU memory of the worker's context; 0 on the host.",
           [](const DeviceReport& d) { return d.store.device.overhead_bytes; });
  w.device("kvq_slabs_created_total", kCounter, "Slabs given to a tenant.",
           [](const DeviceReport& d) { return d.store.counts.slabs_created; });
  w.device("kvq_slabs_destroyed_total", kCounter, "Slabs taken back from a tenant.",
           [](const DeviceReport& d) { return d.store.counts.slabs_destroyed; });
}

void write_pressure(Writer& w) {
  w.device("kvq_pressure_level", kGauge, "0 calm, 1 quantize, 2 evict, 3 refuse.",
           [](const DeviceReport& d) { return static_cast<std::uint64_t>(d.store.level); });
  w.of_devices("kvq_watermark_ratio", kGauge, "Shares of the arena at which the levels begin, and the relief below.",
               [&](const DeviceReport& d, const Labels& l) {
                 const Watermarks& m = d.store.watermarks;
                 w.out.sample(w.with(l, "mark", "quantize_at"), m.quantize_at);
                 w.out.sample(w.with(l, "mark", "evict_at"), m.evict_at);
                 w.out.sample(w.with(l, "mark", "refuse_at"), m.refuse_at);
                 w.out.sample(w.with(l, "mark", "relief"), m.relief);
               });
  w.of_devices("kvq_transcodes_total", kCounter, "Pages rewritten, by format before and after; equal: moved.",
               [&](const DeviceReport& d, const Labels& l) {
                 for (std::size_t from = 1; from < kFormatCount; ++from) {
                   for (std::size_t to = 1; to < kFormatCount; ++to) {
                     const bool possible = from == to || from == static_cast<std::size_t>(Format::dense);
                     const std::uint64_t pages = d.store.counts.transcodes[from][to];
                     if (!possible && pages == 0) continue;
                     w.out.sample(w.with(w.with(l, "from", kFormats[from]), "to", kFormats[to]), pages);
                   }
                 }
               });
  w.device("kvq_transcode_failures_total", kCounter, "Transcodes that left their page as it was.",
           [](const DeviceReport& d) { return d.store.counts.transcode_failures; });
  w.device("kvq_transcode_written_bytes_total", kCounter, "Bytes of the pages that transcodes made.",
           [](const DeviceReport& d) { return d.store.counts.transcode_bytes; });
  w.device("kvq_transcodes_in_flight", kGauge, "Pages that are being rewritten.",
           [](const DeviceReport& d) { return std::uint64_t{d.store.transcodes_in_flight}; });
  w.device("kvq_evicted_pages_total", kCounter, "Cached pages dropped to make room.",
           [](const DeviceReport& d) { return d.store.counts.drops; });
  w.device("kvq_refusals_total", kCounter, "Requests for pages that waited and were not met.",
           [](const DeviceReport& d) { return d.store.counts.refusals; });
  w.device("kvq_parked_requests", kGauge, "Requests that wait for room.",
           [](const DeviceReport& d) { return std::uint64_t{d.parked}; });
}

void write_sessions(Writer& w) {
  w.device("kvq_sessions", kGauge, "Registered models.",
           [](const DeviceReport& d) { return std::uint64_t{d.sessions}; });
  w.device("kvq_sessions_opened_total", kCounter, "Sessions that began.",
           [](const DeviceReport& d) { return d.counts.opened; });
  w.of_devices("kvq_sessions_ended_total", kCounter,
               "Sessions released: closed by the client, lost (its process or connection ended), evicted.",
               [&](const DeviceReport& d, const Labels& l) {
                 w.out.sample(w.with(l, "how", "closed"), d.counts.closed);
                 w.out.sample(w.with(l, "how", "lost"), d.counts.lost);
                 w.out.sample(w.with(l, "how", "evicted"), d.counts.evicted);
               });
  w.device("kvq_commands_refused_total", kCounter, "Commands that named what their session does not own.",
           [](const DeviceReport& d) { return d.store.counts.commands_refused; });
  w.of_devices("kvq_oldest_step_seconds", kGauge, "Age of the oldest open step; 0 when none is open.",
               [&](const DeviceReport& d, const Labels& l) { w.out.sample_ms(l, d.store.oldest_step_ms); });
}

void write_health(Writer& w) {
  w.device("kvq_device_degraded", kGauge, "1 while nothing can be transcoded, or slabs are out of reach.",
           [](const DeviceReport& d) { return std::uint64_t{d.store.device.degraded ? 1u : 0u}; });
  w.device("kvq_worker_restarts_total", kCounter, "GPU workers started in place of one that ended.",
           [](const DeviceReport& d) { return std::uint64_t{d.store.device.restarts}; });
  w.device("kvq_damaged_pages_total", kCounter, "Pages whose bytes did not match their checksum.",
           [](const DeviceReport& d) { return d.store.verify.pages_bad_ever; });
  w.device("kvq_verify_passes_total", kCounter, "Passes over all pages that have ended.",
           [](const DeviceReport& d) { return d.store.verify.passes; });
  w.device("kvq_draining", kGauge, "1 when nothing new is admitted.",
           [](const DeviceReport& d) { return std::uint64_t{d.store.draining ? 1u : 0u}; });
  w.device("kvq_adopted", kGauge, "1 when this kvqd took over an earlier one's state.",
           [](const DeviceReport& d) { return std::uint64_t{d.store.adopt.adopted ? 1u : 0u}; });
  w.device("kvq_adopt_refused", kGauge, "1 when an earlier kvqd's state was there and could not be taken.",
           [](const DeviceReport& d) { return std::uint64_t{d.store.adopt.refused.empty() ? 0u : 1u}; });
  w.device("kvq_ticks_total", kCounter, "Turns of the store.", [](const DeviceReport& d) { return d.ticks; });
}

void write_times(Writer& w) {
  w.device("kvq_alloc_wait_seconds", kHistogram, "How long requests for pages took, met or refused.",
           [](const DeviceReport& d) { return d.counts.alloc_wait; });
  w.device("kvq_restore_seconds", kHistogram, "How long parked sequences took to run again, or to be refused.",
           [](const DeviceReport& d) { return d.counts.restore; });
  w.device("kvq_grace_period_seconds", kHistogram, "From a slot's retirement until no step could read it.",
           [](const DeviceReport& d) { return d.store.counts.grace_period; });
  w.device("kvq_transcode_seconds", kHistogram, "From the decision to rewrite a page until readers find it.",
           [](const DeviceReport& d) { return d.store.counts.transcode; });
  w.device("kvq_step_seconds", kHistogram, "How long the oldest step of a session was open, as the ticks saw it.",
           [](const DeviceReport& d) { return d.store.counts.step; });
}

// A series for each layer that a model has had: from its registration on, so at zero before the first page.
void write_noise(Writer& w) {
  w.of_devices("kvq_quantization_noise_ratio", kHistogram,
               "Error of keys by quantizing, relative to the keys: logit noise for queries without a direction. One "
               "layer of one page every 200 ms.",
               [&](const DeviceReport& d, const Labels& l) {
                 for (std::size_t i = 0; i < d.store.counts.noise.size(); ++i) {
                   w.out.sample(w.with(l, "layer", std::to_string(i)), d.store.counts.noise[i]);
                 }
               });
}

void write_tenant_memory(Writer& w) {
  using Store = const StoreStatus&;
  w.of_tenants("kvq_tenant_quota_bytes", kGauge, "Most memory that the tenant may hold.",
               [&](const TenantStatus& t, const Labels& l, Store s) {
                 w.out.sample(l, t.quota_bytes == 0 ? s.arena_bytes : t.quota_bytes);
               });
  w.of_tenants("kvq_tenant_memory_bytes", kGauge, "What the tenant holds, in whole slabs: pages, limbo and slack.",
               [&](const TenantStatus& t, const Labels& l, Store) {
                 w.out.sample(w.with(l, "kind", "pages"), t.page_bytes);
                 w.out.sample(w.with(l, "kind", "limbo"), t.limbo_bytes);
                 w.out.sample(w.with(l, "kind", "slack"), t.free_bytes);
               });
  w.of_tenants("kvq_tenant_pages", kGauge, "Live pages by format.", [&](const TenantStatus& t, const Labels& l, Store) {
    for (std::size_t f = 1; f < kFormatCount; ++f) {
      w.out.sample(w.with(l, "format", kFormats[f]), t.format[f].pages);
    }
  });
  w.tenant("kvq_tenant_cached_pages", kGauge, "Sealed pages that no sequence holds.",
           [](const TenantStatus& t) { return t.cached_pages; });
  w.tenant("kvq_tenant_pressure_level", kGauge, "Of the tenant's quota: 0 calm, 1 quantize, 2 evict, 3 refuse.",
           [](const TenantStatus& t) { return static_cast<std::uint64_t>(t.level); });
  w.tenant("kvq_tenant_sessions", kGauge, "Registered models of the tenant.",
           [](const TenantStatus& t) { return std::uint64_t{t.sessions}; });
}

void write_tenant_work(Writer& w) {
  using Store = const StoreStatus&;
  w.tenant("kvq_tenant_refusals_total", kCounter, "The tenant's requests for pages that were not met.",
           [](const TenantStatus& t) { return t.counts.refusals; });
  w.tenant("kvq_sealed_tokens_total", kCounter, "Tokens of pages that were computed and completed.",
           [](const TenantStatus& t) { return t.counts.sealed_pages * kPageTokens; });
  w.tenant("kvq_prefix_attaches_total", kCounter, "Prefixes that clients found and asked for.",
           [](const TenantStatus& t) { return t.counts.lookups; });
  w.tenant("kvq_prefix_hits_total", kCounter, "Prefixes that they got: the others had gone in between.",
           [](const TenantStatus& t) { return t.counts.hits; });
  w.of_tenants("kvq_prefix_hit_tokens_total", kCounter, "Tokens that were there already, by format of their pages.",
               [&](const TenantStatus& t, const Labels& l, Store) {
                 for (std::size_t f = 1; f < kFormatCount; ++f) {
                   w.out.sample(w.with(l, "format", kFormats[f]), t.counts.hit_pages[f] * kPageTokens);
                 }
               });
}

}  // namespace

std::string metrics_text(const NodeReport& report) {
  Writer w(report);
  w.out.family("kvq_build_info", kGauge, "Always 1: which kvqd this is.");
  w.out.sample({{"version", KVQ_VERSION}}, std::uint64_t{1});
  w.out.family("kvq_uptime_seconds", kGauge, "Since this kvqd started.");
  w.out.sample_ms({}, report.uptime_ms);
  w.out.family("kvq_connections", kGauge, "Connected processes.");
  w.out.sample({}, std::uint64_t{report.connections});
  w.out.family("kvq_step_deadline_seconds", kGauge,
               "A step that blocks reuse for longer gets its session no new pages.");
  w.out.sample_ms({}, report.step_deadline_ms);
  write_memory(w);
  write_pressure(w);
  write_sessions(w);
  write_health(w);
  write_times(w);
  write_noise(w);
  write_tenant_memory(w);
  write_tenant_work(w);
  return w.out.take();
}

}  // namespace kvq
