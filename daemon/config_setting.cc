// The table of settings, and reading one value of it with its range. A new scalar setting is one line here and a field.
#include "daemon/config_setting.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <sstream>
#include <vector>

namespace kvq {
namespace {

constexpr std::uint64_t kMaxArenaBytes = 1ull << 48;  // 40 bits of offset in units of 256 bytes
constexpr std::uint64_t kMaxSlabBytes = 1ull << 40;
constexpr std::uint64_t kMostMs = 86'400'000;  // a day
constexpr std::size_t kMostDevices = 64;       // each has a range of session numbers of its own

constexpr std::array<std::string_view, 3> kGpuExports = {"auto", "vmm", "legacy"};
constexpr std::array<std::string_view, 6> kLogLevels = {"trace", "debug", "info", "warn", "error", "off"};
constexpr std::array<std::string_view, kFormatCount> kFormatNames = {"none",    "dense",   "int4",
                                                                     "int4_k4", "int4_k8", "k8v4"};

template <auto Field>
void set_text(Config& config, const Setting& setting) {
  config.*Field = setting.text();
}

template <auto Field, std::uint64_t Least, std::uint64_t Most>
void set_integer(Config& config, const Setting& setting) {
  config.*Field = static_cast<std::uint32_t>(setting.integer(Least, Most));
}

template <auto Field>
void set_boolean(Config& config, const Setting& setting) {
  config.*Field = setting.boolean();
}

template <auto Field>
void set_watermark(Config& config, const Setting& setting) {
  config.watermarks.*Field = setting.fraction();
}

void set_socket(Config& config, const Setting& setting) {
  config.socket = setting.text();
  if (config.socket.empty()) setting.fail("must name a path, such as /run/kvq/kvqd.sock");
}

void set_device(Config& config, const Setting& setting) {
  const auto name = setting.text();
  config.device_uuids.clear();
  config.device = name == "auto" ? DeviceKind::automatic : name == "host" ? DeviceKind::host : DeviceKind::cuda;
  if (name == "auto" || name == "host" || name == "cuda") return;
  std::istringstream list(name);
  for (std::string uuid; std::getline(list, uuid, ',');) {
    if (!uuid.starts_with("GPU-") && !uuid.starts_with("MIG-")) {
      setting.fail("must be auto, host, cuda, or the UUIDs of GPUs such as GPU-4d5f... (nvidia-smi -L lists them)");
    }
    if (std::find(config.device_uuids.begin(), config.device_uuids.end(), uuid) != config.device_uuids.end()) {
      setting.fail("names " + uuid + " twice");
    }
    config.device_uuids.push_back(uuid);
  }
  if (config.device_uuids.empty() || config.device_uuids.size() > kMostDevices) {
    setting.fail("must name 1 to " + std::to_string(kMostDevices) + " GPUs");
  }
}

// "80%": of the GPU's memory.
void set_arena(Config& config, const Setting& setting) {
  config.arena_percent = 0;
  const auto* text = std::get_if<std::string>(&setting.value);
  if (text == nullptr || !text->ends_with('%')) {
    config.arena_bytes = setting.size(4096, kMaxArenaBytes);
    return;
  }
  const char* end = text->data() + text->size() - 1;
  const auto [at, error] = std::from_chars(text->data(), end, config.arena_percent);
  if (error != std::errc() || at != end || config.arena_percent < 1 || config.arena_percent > 100) {
    setting.fail("must be a size such as \"4GiB\", or on a GPU a share of its memory from \"1%\" to \"100%\"");
  }
}

void set_slab(Config& config, const Setting& setting) {
  config.slab_bytes = config.gpu_slab_bytes = setting.size(1, kMaxSlabBytes);
}

void set_log_level(Config& config, const Setting& setting) {
  config.log_level = kLogLevels[setting.choice(kLogLevels)];
}

void set_metrics(Config& config, const Setting& setting) {
  const std::string text = setting.text();
  MetricsAddress address;
  const std::string_view unix_path = std::string_view(text).substr(0, 6) == "unix:/" ? text.c_str() + 5 : "";
  if (!unix_path.empty()) {
    address.path = unix_path;
  } else if (text != "off") {
    const std::string_view host = text.starts_with("[::1]:") ? "[::1]:" : "127.0.0.1:";
    const char* const end = text.data() + text.size();
    const char* const digits = text.data() + std::min(host.size(), text.size());
    const auto [at, error] = std::from_chars(digits, end, address.port);
    if (!text.starts_with(host) || error != std::errc() || at != end || address.port == 0) {
      setting.fail("must be \"127.0.0.1:PORT\", \"[::1]:PORT\", \"unix:/PATH\" or \"off\": only loopback is served");
    }
    address.host = host == "[::1]:" ? "::1" : "127.0.0.1";
  }
  config.metrics = std::move(address);
}

void set_gpu_export(Config& config, const Setting& setting) {
  config.gpu_export = kGpuExports[setting.choice(kGpuExports)];
}

void set_unlisted(Config& config, const Setting& setting) {
  const auto* text = std::get_if<std::string>(&setting.value);
  config.allow_unlisted = text == nullptr || *text != "refuse";
  if (config.allow_unlisted && text != nullptr && !parse_size(*text)) {
    setting.fail("must be a size such as \"1GiB\", or \"refuse\"");
  }
  config.unlisted_quota_bytes = config.allow_unlisted ? setting.size(1, kMaxArenaBytes) : 0;
}

void set_cold_format(Config& config, const Setting& setting) {
  config.cold_format = format_choice(setting, {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4});
}

constexpr SettingRule kRules[] = {
    {"socket", ValueKind::text, "path of the listening socket", set_socket},
    {"socket_group", ValueKind::text, "group that may connect", set_text<&Config::socket_group>},
    {"device", ValueKind::text,
     "where pages live: host, cuda (all GPUs), UUIDs of GPUs (A,B), or auto (all GPUs if there is one)", set_device},
    {"gpu_export", ValueKind::text, "how a GPU's memory is passed on: vmm, legacy, or auto (vmm where the GPU can)",
     set_gpu_export},
    {"arena_bytes", ValueKind::size, "memory for all pages of a device, such as 4GiB, or 80% of a GPU", set_arena},
    {"slab_bytes", ValueKind::size, "unit of mapping, a power of two (default: 64MiB, on a GPU 256MiB)", set_slab},
    {"max_pages", ValueKind::integer, "page ids per tenant", set_integer<&Config::max_pages, 16, 1u << 31>},
    {"max_sessions", ValueKind::integer, "processes that may be connected",
     set_integer<&Config::max_sessions, 1, 4096>},
    {"quantize_at", ValueKind::fraction, "fraction of the arena in use above which cold pages are quantized",
     set_watermark<&WatermarkConfig::quantize_at>},
    {"evict_at", ValueKind::fraction, "fraction above which idle pages are dropped",
     set_watermark<&WatermarkConfig::evict_at>},
    {"refuse_at", ValueKind::fraction, "fraction above which new pages wait and are refused",
     set_watermark<&WatermarkConfig::refuse_at>},
    {"relief", ValueKind::fraction, "how far use must fall below a mark before its level ends",
     set_watermark<&WatermarkConfig::relief>},
    {"residual_window_pages", ValueKind::integer, "newest pages of a running sequence that stay dense",
     set_integer<&Config::residual_window_pages, 0, 1u << 20>},
    {"step_deadline_ms", ValueKind::integer, "an unended step older than this costs its tenant new pages",
     set_integer<&Config::step_deadline_ms, 10, kMostMs>},
    {"cold_format", ValueKind::text, "what quantizing makes: int4, int4_k4, int4_k8, k8v4", set_cold_format},
    {"admin_group", ValueKind::text, "group that may use kvqctl's changing verbs", set_text<&Config::admin_group>},
    {"metrics", ValueKind::text, "where Prometheus may ask: 127.0.0.1:PORT, [::1]:PORT, unix:/PATH (default: off)",
     set_metrics},
    {"log_level", ValueKind::text, "trace, debug, info, warn, error, off", set_log_level},
    {"lock_memory", ValueKind::boolean, "keep pages out of swap", set_boolean<&Config::lock_memory>},
    {"unlisted_quota_bytes", ValueKind::size,
     "users of no tenant get one each, with this quota, or \"refuse\" (default: the arena; refuse with [[tenants]])",
     set_unlisted},
};

constexpr SettingRule kTestRules[] = {
    {"gpu_worker", ValueKind::text, "the GPU worker's program (default: kvqd-gpu beside kvqd)",
     set_text<&Config::gpu_worker>},
    {"worker_deadline_ms", ValueKind::integer, "a GPU worker that stands still for longer is killed and started anew",
     set_integer<&Config::worker_deadline_ms, 100, kMostMs>},
};

std::string join(std::span<const std::string_view> names) {
  std::string all;
  for (const auto name : names) all += (all.empty() ? "" : ", ") + std::string(name);
  return all;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

void Setting::fail(const std::string& problem) const {
  auto written = shown.empty() ? key : key + " = " + shown;
  std::replace(written.begin(), written.end(), '\n', ' ');  // one line, whatever the value holds
  throw StartupError(ExitCode::usage, place + ": " + written + ": " + problem);
}

std::string Setting::text() const {
  if (const auto* found = std::get_if<std::string>(&value)) return *found;
  fail("must be text in quotes");
}

bool Setting::boolean() const {
  if (const auto* found = std::get_if<bool>(&value)) return *found;
  fail("must be true or false");
}

std::uint64_t Setting::integer(std::uint64_t least, std::uint64_t most) const {
  const auto* found = std::get_if<std::int64_t>(&value);
  const auto range = "must be an integer from " + std::to_string(least) + " to " + std::to_string(most);
  if (found == nullptr || *found < 0) fail(range);
  const auto number = static_cast<std::uint64_t>(*found);
  if (number < least || number > most) fail(range);
  return number;
}

double Setting::fraction() const {
  double number = 0;
  if (const auto* real = std::get_if<double>(&value)) number = *real;
  if (const auto* whole = std::get_if<std::int64_t>(&value)) number = static_cast<double>(*whole);
  if (!(number > 0 && number <= 1)) fail("must be a fraction of the arena above 0 and at most 1, such as 0.85");
  return number;
}

std::uint64_t Setting::size(std::uint64_t least, std::uint64_t most) const {
  std::optional<std::uint64_t> bytes;
  if (const auto* whole = std::get_if<std::int64_t>(&value); whole != nullptr && *whole >= 0) bytes = *whole;
  if (const auto* written = std::get_if<std::string>(&value)) bytes = parse_size(*written);
  if (!bytes) fail("must be a size: bytes, or a number with B, KiB, MiB, GiB or TiB, such as \"256MiB\"");
  if (*bytes < least || *bytes > most) {
    fail("must be from " + std::to_string(least) + " to " + std::to_string(most) + " bytes");
  }
  return *bytes;
}

std::size_t Setting::choice(std::span<const std::string_view> names) const {
  const auto name = text();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) fail("must be one of " + join(names));
  return static_cast<std::size_t>(found - names.begin());
}

std::span<const SettingRule> setting_rules() { return kRules; }
std::span<const SettingRule> test_rules() { return kTestRules; }

void apply_setting(const SettingRule& rule, Setting setting, Config& config, Origins& origins) {
  rule.apply(config, setting);
  origins.insert_or_assign(std::string(rule.key), std::move(setting));
}

Format format_choice(const Setting& setting, std::initializer_list<Format> formats) {
  std::vector<std::string_view> names;
  for (const auto format : formats) names.push_back(kFormatNames[static_cast<std::size_t>(format)]);
  return formats.begin()[setting.choice(names)];
}

std::optional<std::uint64_t> parse_size(std::string_view text) {
  static constexpr std::pair<std::string_view, unsigned> kUnits[] = {{"", 0},     {"B", 0},    {"KiB", 10},
                                                                     {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  auto unit = text.substr(static_cast<std::size_t>(end - text.data()));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  for (const auto& [name, shift] : kUnits) {
    if (unit == name) return number > (UINT64_MAX >> shift) ? std::nullopt : std::optional(number << shift);
  }
  return std::nullopt;
}

std::string decimal(double value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}

std::string suggestion(std::string_view word, std::span<const std::string> candidates, std::string_view otherwise) {
  const std::string* best = nullptr;
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    const auto distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = &candidate;
    }
  }
  return best != nullptr ? "did you mean " + *best + "?" : std::string(otherwise);
}

}  // namespace kvq
