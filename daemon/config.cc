// Command line over file over defaults, then the checks that span settings.
#include "daemon/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>

#include "daemon/config_file.h"
#include "daemon/config_setting.h"

namespace kvq {
namespace {

constexpr std::uint64_t kMachinePageBytes = 4096;
constexpr std::uint64_t kMaxSlabs = 65536;  // each is a descriptor in every process of its tenant

std::string option_name(std::string_view key) {
  std::string name = "--" + std::string(key);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

template <typename Body>
void for_each_rule(Body body) {
  for (const auto& rule : setting_rules()) body(rule);
  for (const auto& rule : test_rules()) body(rule);
}

// The command line has only text; the rule's kind says what it stands for. What does not parse stays text, which the
// rule then refuses with its own words.
Setting command_line_setting(const SettingRule& rule, const std::string& text) {
  Setting setting{"command line", option_name(rule.key), text, text};
  const char* end = text.data() + text.size();
  std::int64_t whole = 0;
  if (rule.kind == ValueKind::integer) {
    if (const auto parsed = std::from_chars(text.data(), end, whole); parsed.ec == std::errc() && parsed.ptr == end) {
      setting.value = whole;
    }
  } else if (rule.kind == ValueKind::fraction) {
    double real = 0;
    if (const auto parsed = std::from_chars(text.data(), end, real); parsed.ec == std::errc() && parsed.ptr == end) {
      setting.value = real;
    }
  } else if (rule.kind == ValueKind::boolean && (text == "true" || text == "false")) {
    setting.value = text == "true";
  }
  return setting;
}

// What a check across settings points at: where `key` was set, or that it is the default.
[[noreturn]] void fail_at(const Origins& origins, std::string_view key, const std::string& value,
                          const std::string& problem) {
  if (const auto found = origins.find(key); found != origins.end()) found->second.fail(problem);
  Setting{"default", std::string(key), value, {}}.fail(problem);
}

void check_slabs(const Config& config, const Origins& origins) {
  const auto slab = config.device == DeviceKind::cuda ? config.gpu_slab_bytes : config.slab_bytes;
  const auto shown = std::to_string(slab);
  if (slab % kMachinePageBytes != 0) fail_at(origins, "slab_bytes", shown, "must be a multiple of 4096 bytes");
  if ((slab & (slab - 1)) != 0) fail_at(origins, "slab_bytes", shown, "must be a power of two, such as \"64MiB\"");
  if (config.arena_percent != 0) {
    if (config.device != DeviceKind::host) return;  // what that is, the GPU tells
    fail_at(origins, "arena_bytes", std::to_string(config.arena_percent) + "%",
            "a share is of a GPU's memory; give a size, such as \"4GiB\", or set device");
  }
  const auto arena = std::to_string(config.arena_bytes);
  if (config.arena_bytes % slab != 0) {
    fail_at(origins, "arena_bytes", arena, "must be a multiple of slab_bytes (" + shown + ")");
  }
  const auto slabs = config.arena_bytes / slab;
  if (slabs > kMaxSlabs) {
    fail_at(origins, "arena_bytes", arena,
            "is " + std::to_string(slabs) + " slabs, at most 65536 can be served; raise slab_bytes (" + shown + ")");
  }
  if (slabs <= kReserveSlabs) {
    fail_at(origins, "arena_bytes", arena,
            "is " + std::to_string(slabs) + " slab, and one is kept for transcodes; raise it or lower slab_bytes");
  }
}

void check_watermarks(const WatermarkConfig& marks, const Origins& origins) {
  const auto ordered = [&](std::string_view low_key, double low, std::string_view high_key, double high) {
    if (low < high) return;
    const auto key = origins.contains(high_key) || !origins.contains(low_key) ? high_key : low_key;
    fail_at(origins, key, decimal(key == high_key ? high : low),
            "watermarks must rise: " + std::string(low_key) + " (" + decimal(low) + ") must be below " +
                std::string(high_key) + " (" + decimal(high) + ")");
  };
  ordered("relief", marks.relief, "quantize_at", marks.quantize_at);
  ordered("quantize_at", marks.quantize_at, "evict_at", marks.evict_at);
  ordered("evict_at", marks.evict_at, "refuse_at", marks.refuse_at);
}

void check_quota(const Config& config, const Origins& origins, const std::string& key, std::uint64_t quota) {
  if (quota <= config.arena_bytes || config.arena_percent != 0) return;
  fail_at(origins, key, std::to_string(quota),
          "is above arena_bytes (" + std::to_string(config.arena_bytes) + "); lower it or raise arena_bytes");
}

void check_tenants(const Config& config, const Origins& origins) {
  std::map<std::string, std::size_t> names;
  std::map<std::uint32_t, std::string> uids;
  for (std::size_t i = 0; i < config.tenants.size(); ++i) {
    const auto& tenant = config.tenants[i];
    const auto prefix = "tenants[" + std::to_string(i) + "].";
    check_quota(config, origins, prefix + "quota_bytes", tenant.quota_bytes);
    if (!names.emplace(tenant.name, i).second) {
      fail_at(origins, prefix + "name", tenant.name, "there is a tenant of that name already; choose another");
    }
    for (const auto uid : tenant.uids) {
      const auto [owner, fresh] = uids.emplace(uid, tenant.name);
      if (fresh) continue;
      fail_at(origins, prefix + "uids", "",
              "uid " + std::to_string(uid) + " belongs to tenant " + owner->second + " already; list it once");
    }
  }
  check_quota(config, origins, "unlisted_quota_bytes", config.unlisted_quota_bytes);
  if (config.tenants.empty() && !config.allow_unlisted) {
    fail_at(origins, "unlisted_quota_bytes", "\"refuse\"",
            "nobody could connect; add a [[tenants]] table or give a quota");
  }
}

void check_metrics(const Config& config, const Origins& origins) {
  if (config.metrics.path != config.socket) return;
  fail_at(origins, "metrics", "unix:" + config.socket, "is kvqd's own socket; choose another path");
}

// Defaults that depend on other settings.
void complete(Config& config, const Origins& origins) {
  if (!origins.contains("unlisted_quota_bytes")) config.allow_unlisted = config.tenants.empty();
}

struct Arguments {
  std::string config_path;
  bool check_only = false;
  bool version = false;
  std::map<std::string, std::string> values;  // by key; empty key never occurs
};

void refuse_extras(const CLI::App& app) {
  const auto extras = app.remaining();
  if (extras.empty()) return;
  std::vector<std::string> known = {"--config", "--check-config", "--version", "--help"};
  for_each_rule([&](const SettingRule& rule) { known.push_back(option_name(rule.key)); });
  Setting{"command line", extras.front(), "", {}}.fail("unknown option; " +
                                                       suggestion(extras.front(), known, "kvqd --help lists them"));
}

// "tenants[0].share" becomes "tenants.chat.share": their order says nothing.
std::map<std::string, std::string> given_of(const Origins& origins, const std::vector<TenantConfig>& tenants) {
  std::map<std::string, std::string> given;
  for (const auto& [key, setting] : origins) {
    const auto end = key.find("].");
    if (end == std::string::npos) {
      given.emplace(key, setting.shown);
      continue;
    }
    const std::size_t tenant = std::stoul(key.substr(key.find('[') + 1));
    given.emplace("tenants." + tenants[tenant].name + key.substr(end + 1), setting.shown);
  }
  return given;
}

Config assemble(const Arguments& arguments) {
  Config config;
  Origins origins;
  if (!arguments.config_path.empty()) {
    read_config_file(arguments.config_path, config, origins);
    config.path = std::filesystem::absolute(arguments.config_path).lexically_normal();
  }
  for_each_rule([&](const SettingRule& rule) {
    const auto given = arguments.values.find(std::string(rule.key));
    if (given == arguments.values.end()) return;
    apply_setting(rule, command_line_setting(rule, given->second), config, origins);
  });
  config.given = given_of(origins, config.tenants);
  complete(config, origins);
  check_slabs(config, origins);
  check_watermarks(config.watermarks, origins);
  check_tenants(config, origins);
  check_metrics(config, origins);
  return config;
}

std::string arena_text(const Config& config) {
  const auto slab = config.device == DeviceKind::cuda ? config.gpu_slab_bytes : config.slab_bytes;
  const auto slabs = config.arena_percent != 0 ? std::to_string(config.arena_percent) + " % of the GPU in"
                                               : std::to_string(config.arena_bytes / slab);
  return slabs + " slabs of " + std::to_string(slab) + " bytes";
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  CLI::App app("kvqd keeps the KV cache of this machine's model servers in one arena.", "kvqd");
  Arguments arguments;
  std::map<std::string, std::string> raw;
  app.allow_extras();
  app.add_option("--config", arguments.config_path, "TOML file with any of the settings below and [[tenants]] tables");
  app.add_flag("--check-config", arguments.check_only, "read the settings, say whether they are right, and end");
  app.add_flag("--version", arguments.version, "print the version and end");
  const auto add_options = [&](std::span<const SettingRule> rules, const std::string& group) {
    for (const auto& rule : rules) {
      app.add_option(option_name(rule.key), raw[std::string(rule.key)], std::string(rule.help))->group(group);
    }
  };
  add_options(setting_rules(), "Settings, also keys of the file");
  add_options(test_rules(), "For tests, of the command line alone");
  try {
    app.parse(argc, argv);
    refuse_extras(app);
    if (arguments.version) return {std::nullopt, ExitCode::ok, "kvqd " KVQ_VERSION};
    for (const auto& [key, value] : raw) {
      if (app.count(option_name(key)) > 0) arguments.values.emplace(key, value);
    }
    auto config = assemble(arguments);
    config.command_line.assign(argv + 1, argv + argc);
    if (!arguments.check_only) return {std::move(config), ExitCode::ok, ""};
    return {
        std::nullopt, ExitCode::ok,
        "kvqd: configuration ok: " + arena_text(config) + ", " + std::to_string(config.tenants.size()) + " tenants"};
  } catch (const CLI::CallForHelp&) {
    return {std::nullopt, ExitCode::ok, app.help()};
  } catch (const CLI::ParseError& error) {
    return {std::nullopt, ExitCode::usage,
            std::string("command line: ") + error.what() + "; kvqd --help lists options"};
  } catch (const StartupError& error) {
    return {std::nullopt, error.code, error.what()};
  }
}

}  // namespace kvq
