// Values are compared with what holds now, so that a reload without a change says so.
#include "daemon/reload.h"

#include <algorithm>
#include <set>

#include "daemon/log.h"
#include "kvq/result.h"

namespace kvq {
namespace {

using Names = std::set<std::string>;

struct Outcome {
  Names changed, refused;
  std::string why;  // the first refusal
};

void note(Outcome& out, const std::string& key, const Result<void>& result) {
  (result ? out.changed : out.refused).insert(key);
  if (!result && out.why.empty()) out.why = result.error().context;
}

void reload_watermarks(const WatermarkConfig& next, Store& store, Outcome& out) {
  const Watermarks now = store.status().watermarks;
  const Watermarks then{next.quantize_at, next.evict_at, next.refuse_at, next.relief};
  Names keys;
  if (now.quantize_at != then.quantize_at) keys.insert("quantize_at");
  if (now.evict_at != then.evict_at) keys.insert("evict_at");
  if (now.refuse_at != then.refuse_at) keys.insert("refuse_at");
  if (now.relief != then.relief) keys.insert("relief");
  if (keys.empty()) return;
  const Result<void> result = store.set_watermarks(then);
  for (const std::string& key : keys) note(out, key, result);
}

void reload_tenant(const TenantConfig& next, Store& store, Outcome& out) {
  const auto id = store.find_tenant(next.name);
  if (!id) return;  // needs a restart
  const TenantSpec& now = store.tenant(*id);
  if (now.quota_bytes != next.quota_bytes) {
    note(out, "quota." + next.name, store.set_quota(*id, next.quota_bytes));
  }
  if (now.share != next.share) note(out, "share." + next.name, store.set_share(*id, next.share));
}

// Of a tenant that is in both: only these two may differ.
bool lives(const std::string& key, const Config& started) {
  static const Names kLive = {"quantize_at", "evict_at", "refuse_at", "relief", "log_level"};
  if (kLive.contains(key)) return true;
  const bool of_tenant = key.ends_with(".quota_bytes") || key.ends_with(".share");
  return of_tenant && started.given.contains(key.substr(0, key.rfind('.')) + ".name");
}

Names needing_restart(const Config& started, const Config& next) {
  Names keys;
  for (const auto& [key, value] : next.given) {
    const auto before = started.given.find(key);
    if ((before == started.given.end() || before->second != value) && !lives(key, started)) keys.insert(key);
  }
  for (const auto& [key, value] : started.given) {
    if (!next.given.contains(key) && !lives(key, started)) keys.insert(key);
  }
  return keys;
}

std::string joined(const Names& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : " ") + name;
  return out;
}

}  // namespace

std::string reload(const Config& started, const Config& next, std::span<Store* const> stores) {
  Outcome out;
  for (Store* store : stores) {
    reload_watermarks(next.watermarks, *store, out);
    for (const TenantConfig& tenant : next.tenants) reload_tenant(tenant, *store, out);
  }
  if (set_log_level(next.log_level)) out.changed.insert("log_level");
  std::string line = "event=reloaded changed=\"" + joined(out.changed) + "\"";
  if (const Names keys = needing_restart(started, next); !keys.empty()) {
    line += " needs_restart=\"" + joined(keys) + "\"";
  }
  if (!out.refused.empty()) line += " refused=\"" + joined(out.refused) + "\" why=\"" + out.why + "\"";
  return line;
}

}  // namespace kvq
