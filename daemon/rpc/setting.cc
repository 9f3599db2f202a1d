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

constexpr double kMaxShare = 1000.0;

std::optional<double> parse_number(const std::string& value) {
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || !std::isfinite(number)) return std::nullopt;
  return number;
}

Refusal bad_value(const std::string& key, const std::string& value, const std::string& valid) {
  return {Errc::invalid_argument, key + " = " + printable(value, 80) + " is not valid: " + valid};
}

std::optional<Refusal> set_watermark(Store& store, const std::string& key, const std::string& value,
                                     nlohmann::ordered_json& changed) {
  Watermarks marks = store.status().watermarks;
  double* mark = key == "quantize_at" ? &marks.quantize_at
                 : key == "evict_at"  ? &marks.evict_at
                 : key == "refuse_at" ? &marks.refuse_at
                                      : &marks.relief;
  const auto number = parse_number(value);
  if (!number || *number < 0.0 || *number > 1.0) return bad_value(key, value, "a number from 0 to 1, as in 0.6");
  *mark = *number;
  if (auto outcome = store.set_watermarks(marks); !outcome) {
    const auto now = store.status().watermarks;
    char text[160];
    std::snprintf(text, sizeof(text),
                  "needs 0 < relief < quantize_at <= evict_at <= refuse_at <= 1 (now %g, %g, %g, relief %g)",
                  now.quantize_at, now.evict_at, now.refuse_at, now.relief);
    return bad_value(key, value, text);
  }
  changed = report_watermarks(marks);
  return std::nullopt;
}

std::optional<Refusal> set_of_tenant(Store& store, const std::string& key, const std::string& value,
                                     nlohmann::ordered_json& changed) {
  const auto dot = key.find('.');
  const std::string kind = key.substr(0, dot), name = key.substr(dot + 1);
  const auto tenant = store.find_tenant(name);
  if (!tenant) return Refusal{Errc::invalid_argument, unknown_tenant({&store}, name)};
  Result<void> outcome;
  if (kind == "quota") {
    const auto bytes = parse_size(value);
    if (!bytes) return bad_value(key, value, "a size as in 512MiB or 4GiB, or 0 for the whole arena");
    outcome = store.set_quota(*tenant, *bytes);
  } else {
    const auto share = parse_number(value);
    if (!share || *share <= 0.0 || *share > kMaxShare) return bad_value(key, value, "a number above 0, at most 1000");
    outcome = store.set_share(*tenant, *share);
  }
  if (!outcome) return bad_value(key, value, describe(outcome.error()));
  const TenantSpec& now = store.tenant(*tenant);
  changed = {{"tenant", now.name}, {"quota_bytes", now.quota_bytes}, {"share", now.share}};
  return std::nullopt;
}

}  // namespace

bool names_tenant(const std::string& key) { return key.rfind("quota.", 0) == 0 || key.rfind("share.", 0) == 0; }

std::string unknown_tenant(const std::vector<const Store*>& stores, const std::string& name) {
  std::set<std::string> names;
  for (const Store* store : stores) {
    for (const TenantStatus& tenant : store->status().tenants) names.insert(tenant.name);
  }
  std::string known;
  for (const std::string& tenant : names) known += (known.empty() ? "" : ", ") + tenant;
  return "no tenant is called \"" + printable(name, 80) + "\"; known: " + (known.empty() ? "none" : known);
}

std::optional<Refusal> change_setting(Store& store, const std::string& key, const std::string& value,
                                      nlohmann::ordered_json& changed) {
  if (key == "quantize_at" || key == "evict_at" || key == "refuse_at" || key == "relief") {
    return set_watermark(store, key, value, changed);
  }
  if (names_tenant(key)) return set_of_tenant(store, key, value, changed);
  return Refusal{Errc::invalid_argument,
                 "no setting is called \"" + printable(key, 80) +
                     "\"; use quantize_at, evict_at, refuse_at, relief, quota.TENANT or share.TENANT"};
}

}  // namespace kvq
