// Settings at run time.
#include "daemon/rpc/setting.h"

#include <charconv>
#include <cmath>
#include <set>

#include "daemon/config_setting.h"
#include "daemon/rpc/report.h"
#include "daemon/rpc/wire.h"

namespace kvq {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMaxShare = 1000.0;

// All that `set` knows. `of_tenant`: TENANT stands behind the key and a point.
struct LiveSetting {
  std::string_view key;
  double Watermarks::*mark;
  bool of_tenant() const { return mark == nullptr; }
};
constexpr LiveSetting kLiveSettings[] = {{"quantize_at", &Watermarks::quantize_at},
                                         {"evict_at", &Watermarks::evict_at},
                                         {"refuse_at", &Watermarks::refuse_at},
                                         {"relief", &Watermarks::relief},
                                         {"quota", nullptr},
                                         {"share", nullptr}};

const LiveSetting* find_setting(std::string_view key) {
  const std::size_t dot = key.find('.');
  for (const LiveSetting& setting : kLiveSettings) {
    if (setting.key == key.substr(0, dot) && setting.of_tenant() == (dot != key.npos)) return &setting;
  }
  return nullptr;
}

std::string known_keys() {
  std::string out;
  for (const LiveSetting& setting : kLiveSettings) {
    if (!out.empty()) out += &setting == std::end(kLiveSettings) - 1 ? " or " : ", ";
    out += std::string(setting.key) + (setting.of_tenant() ? ".TENANT" : "");
  }
  return out;
}

std::optional<double> parse_number(const std::string& value) {
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || !std::isfinite(number)) return std::nullopt;
  return number;
}

Refusal bad_value(const std::string& key, const std::string& value, const std::string& valid) {
  return {Errc::invalid_argument, key + " = " + printable(value, 80) + " is not valid: " + valid};
}

std::optional<Refusal> set_watermark(Store& store, const LiveSetting& setting, const std::string& value, bool dry_run,
                                     Json& changed) {
  const std::string key(setting.key);
  const Watermarks now = store.status().watermarks;
  Watermarks marks = now;
  const auto number = parse_number(value);
  if (!number || *number < 0.0 || *number > 1.0) return bad_value(key, value, "a number from 0 to 1, as in 0.6");
  marks.*setting.mark = *number;
  if (!valid(marks) || (!dry_run && !store.set_watermarks(marks))) {
    char text[160];
    std::snprintf(text, sizeof(text),
                  "needs 0 < relief < quantize_at <= evict_at <= refuse_at <= 1 (now %g, %g, %g, relief %g)",
                  now.quantize_at, now.evict_at, now.refuse_at, now.relief);
    return bad_value(key, value, text);
  }
  changed = report_watermarks(marks);
  return std::nullopt;
}

std::optional<Refusal> set_of_tenant(Store& store, const std::string& key, const std::string& value, bool dry_run,
                                     Json& changed) {
  const auto dot = key.find('.');
  const std::string kind = key.substr(0, dot), name = key.substr(dot + 1);
  const auto tenant = store.find_tenant(name);
  if (!tenant) return Refusal{Errc::invalid_argument, unknown_tenant({&store}, name)};
  Configured::Limits limits{store.tenant(*tenant).quota_bytes, store.tenant(*tenant).share};
  Result<void> outcome;
  if (kind == "quota") {
    const auto bytes = parse_size(value);
    if (!bytes) return bad_value(key, value, "a size as in 512MiB or 4GiB, or 0 for the whole arena");
    const std::uint64_t slab_bytes = store.status().slab_bytes;
    if (*bytes != 0 && *bytes < slab_bytes) {
      return bad_value(key, value, "at least one slab (" + std::to_string(slab_bytes) + " bytes), or 0");
    }
    limits.quota_bytes = *bytes;
    if (!dry_run) outcome = store.set_quota(*tenant, *bytes);
  } else {
    const auto share = parse_number(value);
    if (!share || *share <= 0.0 || *share > kMaxShare) return bad_value(key, value, "a number above 0, at most 1000");
    limits.share = *share;
    if (!dry_run) outcome = store.set_share(*tenant, *share);
  }
  if (!outcome) return bad_value(key, value, describe(outcome.error()));
  changed = {{"tenant", name}, {"quota_bytes", limits.quota_bytes}, {"share", limits.share}};
  return std::nullopt;
}

std::optional<Configured::Limits> configured_limits(const Configured* configured, const std::string& tenant) {
  if (configured == nullptr) return std::nullopt;
  if (const auto found = configured->tenants.find(tenant); found != configured->tenants.end()) return found->second;
  return tenant.rfind("uid-", 0) == 0 ? configured->unlisted : std::nullopt;
}

Json report_setting(const std::string& key, const Json& value, const Json& configured) {
  return {{"key", key},
          {"value", value},
          {"configured", configured},
          {"live", !configured.is_null() && configured != value}};
}

}  // namespace

bool names_tenant(const std::string& key) {
  const LiveSetting* setting = find_setting(key);
  return setting != nullptr && setting->of_tenant();
}

std::string unknown_tenant(const std::vector<const Store*>& stores, const std::string& name) {
  std::set<std::string> names;
  for (const Store* store : stores) {
    for (const TenantStatus& tenant : store->status().tenants) names.insert(tenant.name);
  }
  std::string known;
  for (const std::string& tenant : names) known += (known.empty() ? "" : ", ") + tenant;
  return "no tenant is called \"" + printable(name, 80) + "\"; known: " + (known.empty() ? "none" : known);
}

std::optional<Refusal> change_setting(Store& store, const std::string& key, const std::string& value, bool dry_run,
                                      Json& changed) {
  const LiveSetting* setting = find_setting(key);
  if (setting == nullptr) {
    return Refusal{Errc::invalid_argument, "no setting is called \"" + printable(key, 80) + "\"; use " + known_keys()};
  }
  if (setting->of_tenant()) return set_of_tenant(store, key, value, dry_run, changed);
  return set_watermark(store, *setting, value, dry_run, changed);
}

void note_saved(Configured& configured, const Store& store, const std::string& key) {
  const LiveSetting* setting = find_setting(key);
  if (!setting->of_tenant()) {
    configured.watermarks.*setting->mark = store.status().watermarks.*setting->mark;
    return;
  }
  const TenantSpec& now = store.tenant(*store.find_tenant(key.substr(key.find('.') + 1)));
  Configured::Limits& limits = configured.tenants[now.name];
  if (setting->key == "quota") {
    limits.quota_bytes = now.quota_bytes;
  } else {
    limits.share = now.share;
  }
}

Json report_settings(const std::vector<const Store*>& stores, const Configured* configured) {
  Json out = Json::array();
  const Watermarks marks = stores.front()->status().watermarks;
  for (const LiveSetting& setting : kLiveSettings) {
    if (setting.of_tenant()) continue;
    const Json said = configured != nullptr ? Json(configured->watermarks.*setting.mark) : Json();
    out.push_back(report_setting(std::string(setting.key), marks.*setting.mark, said));
  }
  std::set<std::string> seen;
  for (const Store* store : stores) {
    for (const TenantStatus& tenant : store->status().tenants) {
      if (!seen.insert(tenant.name).second) continue;
      const auto said = configured_limits(configured, tenant.name);
      out.push_back(
          report_setting("quota." + tenant.name, tenant.quota_bytes, said ? Json(said->quota_bytes) : Json()));
      out.push_back(report_setting("share." + tenant.name, tenant.share, said ? Json(said->share) : Json()));
    }
  }
  return out;
}

}  // namespace kvq
