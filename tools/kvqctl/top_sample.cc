// kvqd's documents into figures.
#include "tools/kvqctl/top_sample.h"

#include <algorithm>

#include "tools/kvqctl/text.h"

namespace kvqctl {
namespace {

std::string text_at(const Json& from, const char* key) { return ascii(from.at(key).get<std::string>()); }
double number_at(const Json& from, const char* key) { return from.at(key).get<double>(); }

TenantSample tenant_of(const Json& t, const std::string& device) {
  TenantSample out;
  out.device = device;
  out.name = text_at(t, "name");
  out.level = text_at(t, "level");
  out.sessions = number_at(t, "sessions");
  out.holds = number_at(t, "slab_bytes");
  out.quota = number_at(t, "quota_bytes");
  out.limbo = number_at(t, "limbo_bytes");
  out.cached_pages = number_at(t, "cached_pages");
  out.hit_pages = number_at(t, "hit_pages");
  for (const auto& [format, use] : t.at("formats").items()) {
    (format == "dense" ? out.dense : out.quantized) += number_at(use, "bytes");
    out.pages += number_at(use, "pages");
  }
  return out;
}

void add_tenant(DeviceSample& device, const Json& t) {
  device.counters.lookups += number_at(t, "lookups");
  device.counters.hit_pages += number_at(t, "hit_pages");
  device.counters.computed_pages += number_at(t, "computed_pages");
  device.use.limbo += number_at(t, "limbo_bytes");
  device.use.slack += number_at(t, "free_bytes");
  for (const auto& [format, use] : t.at("formats").items()) {
    const double bytes = number_at(use, "bytes");
    (format == "dense" ? device.use.dense : device.use.quantized) += bytes;
    device.formats[ascii(format)] += bytes;
  }
}

DeviceSample device_of(const Json& d) {
  const Json& arena = d.at("arena");
  const Json& marks = d.at("watermarks");
  const Json& transcodes = d.at("transcodes");
  const Json& health = d.at("device_health");
  DeviceSample out;
  out.name = text_at(health, "uuid").empty() ? text_at(d, "device") : text_at(health, "uuid");
  out.level = text_at(d, "level");
  if (health.at("state") != "ok") out.unwell = text_at(health, "text");
  out.draining = d.at("draining").get<bool>();
  out.quantize_at = number_at(marks, "quantize_at");
  out.evict_at = number_at(marks, "evict_at");
  out.refuse_at = number_at(marks, "refuse_at");
  out.in_flight = number_at(transcodes, "in_flight");
  out.counters.transcodes = number_at(transcodes, "done");
  out.counters.transcode_bytes = number_at(transcodes, "bytes");
  out.counters.failed = number_at(transcodes, "failed");
  out.counters.dropped_pages = number_at(d, "dropped_pages");
  out.counters.refusals = number_at(d, "refusals");
  for (const Json& t : d.at("tenants")) add_tenant(out, t);
  out.use.unused = std::max(0.0, number_at(arena, "bytes") - out.use.arena());
  return out;
}

SessionSample session_of(const Json& s) {
  SessionSample out;
  out.device = text_at(s, "device");
  out.tenant = text_at(s, "tenant");
  out.label = text_at(s, "label");
  out.state = state_of(s);
  out.id = number_at(s, "id");
  out.pid = number_at(s, "pid");
  out.open_steps = number_at(s, "open_steps");
  out.oldest_step_ms = number_at(s, "oldest_step_ms");
  out.limbo = number_at(s, "limbo_bytes");
  out.pages = number_at(s, "pages");
  out.sequences = number_at(s, "sequences");
  out.running = number_at(s, "running");
  out.credits = number_at(s, "credits");
  out.lost_pages = number_at(s, "lost_pages");
  out.hung = s.at("hung").get<bool>();
  return out;
}

}  // namespace

Use& Use::operator+=(const Use& more) {
  dense += more.dense;
  quantized += more.quantized;
  limbo += more.limbo;
  slack += more.slack;
  unused += more.unused;
  return *this;
}

Counters& Counters::operator+=(const Counters& more) {
  for (const auto counter : kCounters) this->*counter += more.*counter;
  return *this;
}

Sample sample_of(const Json& status, const Json& sessions, std::uint64_t at_ms) {
  Sample out;
  out.at_ms = at_ms;
  out.version = text_at(status, "version");
  out.pid = status.at("pid").get<std::uint64_t>();
  out.uptime_ms = status.at("uptime_ms").get<std::uint64_t>();
  out.connections = number_at(status, "connections");
  out.waiting = number_at(status, "parked_requests");
  const Json one = Json::array({status});
  for (const Json& d : status.contains("devices") ? status.at("devices") : one) {
    out.devices.push_back(device_of(d));
    for (const Json& t : d.at("tenants")) out.tenants.push_back(tenant_of(t, out.devices.back().name));
  }
  for (const Json& s : sessions.at("sessions")) out.sessions.push_back(session_of(s));
  return out;
}

}  // namespace kvqctl
