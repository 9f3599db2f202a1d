// TOML into settings; toml++ knows each value's line, so each error can name it. The only file that includes toml++.
#include "daemon/config_file.h"

#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

namespace kvq {
namespace {

constexpr std::uint64_t kLargestId = UINT32_MAX - 1;  // uid -1 means "none" to the kernel
const std::vector<std::string> kTenantKeys = {"name", "uids", "gids", "quota_bytes", "share", "format_floor", "salt"};

// As the operator wrote it, near enough: toml++ itself would print 0.6 as 0.59999999999999998. Tables show nothing.
std::string shown_value(const toml::node& node) {
  if (const auto* text = node.as_string()) return '"' + text->get() + '"';
  if (const auto* real = node.as_floating_point()) return decimal(real->get());
  std::ostringstream shown;
  if (!node.is_table() && !node.is_array_of_tables()) shown << toml::node_view<const toml::node>(node);
  return shown.str();
}

// A list of texts as the command line gives it. What is no text shows as it is and is refused by its reader.
std::string joined(const toml::array& list) {
  std::string out;
  for (const auto& item : list) {
    const auto* text = item.as_string();
    out += (out.empty() ? "" : ",") + (text != nullptr ? text->get() : std::string("?"));
  }
  return out;
}

Setting to_setting(const std::string& path, std::string_view key, const toml::node& node) {
  Setting setting{path + ":" + std::to_string(node.source().begin.line), std::string(key), shown_value(node), {}};
  if (const auto* text = node.as_string()) setting.value = text->get();
  if (const auto* whole = node.as_integer()) setting.value = whole->get();
  if (const auto* real = node.as_floating_point()) setting.value = real->get();
  if (const auto* flag = node.as_boolean()) setting.value = flag->get();
  if (const auto* list = node.as_array(); list != nullptr && key == "device") setting.value = joined(*list);
  return setting;
}

std::vector<std::uint32_t> to_ids(const std::string& path, std::string_view key, const toml::node& node) {
  const auto* list = node.as_array();
  if (list == nullptr) to_setting(path, key, node).fail("must be a list of numbers, such as [1000]");
  std::vector<std::uint32_t> ids;
  for (const auto& item : *list) {
    ids.push_back(static_cast<std::uint32_t>(to_setting(path, key, item).integer(0, kLargestId)));
  }
  return ids;
}

std::string to_salt(const Setting& setting) {
  const auto hex = setting.text();
  const bool digits = hex.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (!digits || hex.size() < 32 || hex.size() > 128 || hex.size() % 2 != 0) {
    setting.fail("must be 32 to 128 hexadecimal digits, an even number; leave it out for a random one");
  }
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

std::string to_tenant_name(const Setting& setting) {
  const auto name = setting.text();
  const bool plain = name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-_") == std::string::npos;
  if (!plain || name.empty() || name.size() > 32) setting.fail("must be 1 to 32 characters of a-z, 0-9, - and _");
  return name;
}

void set_tenant_key(const std::string& path, std::string_view key, const toml::node& node, TenantConfig& tenant) {
  const auto setting = to_setting(path, key, node);
  if (key == "name") {
    tenant.name = to_tenant_name(setting);
  } else if (key == "uids") {
    tenant.uids = to_ids(path, key, node);
  } else if (key == "gids") {
    tenant.gids = to_ids(path, key, node);
  } else if (key == "quota_bytes") {
    tenant.quota_bytes = setting.size(1, UINT64_MAX);
  } else if (key == "share") {
    tenant.share = static_cast<std::uint32_t>(setting.integer(1, 1000));
  } else if (key == "format_floor") {
    tenant.format_floor = format_choice(setting, {Format::dense, Format::int4});
  } else if (key == "salt") {
    tenant.salt = to_salt(setting);
  } else {
    setting.fail(
        "unknown setting of a tenant; " +
        suggestion(key, kTenantKeys, "known ones are name, uids, gids, quota_bytes, share, format_floor, salt"));
  }
}

void read_tenants(const std::string& path, const toml::node& node, Config& config, Origins& origins) {
  const auto* list = node.as_array();
  if (list == nullptr || !node.is_array_of_tables()) {
    to_setting(path, "tenants", node).fail("must be tables headed [[tenants]], one per tenant");
  }
  for (const auto& item : *list) {
    const auto prefix = "tenants[" + std::to_string(config.tenants.size()) + "].";
    TenantConfig tenant;
    for (const auto& [key, value] : *item.as_table()) {
      set_tenant_key(path, key.str(), value, tenant);
      origins.insert_or_assign(prefix + std::string(key.str()), to_setting(path, key.str(), value));
    }
    Setting whole = to_setting(path, "[[tenants]]", item);
    if (tenant.name.empty()) whole.fail("has no name; add name = \"...\"");
    if (tenant.uids.empty() && tenant.gids.empty()) whole.fail("has neither uids nor gids; add uids = [...]");
    config.tenants.push_back(std::move(tenant));
  }
}

toml::table parse_file(const std::string& path) {
  std::ifstream file(path);
  if (!file || !std::filesystem::is_regular_file(path)) {
    throw StartupError(ExitCode::usage,
                       path + ": cannot be read; check the path given to --config and its permissions");
  }
  try {
    return toml::parse(file, path);
  } catch (const toml::parse_error& error) {
    std::string problem(error.description());
    throw StartupError(ExitCode::usage, path + ":" + std::to_string(error.source().begin.line) +
                                            ": not valid TOML: " + problem.substr(0, problem.find('\n')));
  }
}

}  // namespace

void read_config_file(const std::string& path, Config& config, Origins& origins) {
  const auto table = parse_file(path);
  for (const auto& [key, node] : table) {
    const auto rules = setting_rules();
    const auto rule = std::find_if(rules.begin(), rules.end(), [&](const auto& r) { return r.key == key.str(); });
    if (key.str() == "tenants") {
      read_tenants(path, node, config, origins);
    } else if (rule != rules.end()) {
      apply_setting(*rule, to_setting(path, key.str(), node), config, origins);
    } else {
      std::vector<std::string> known = {"tenants"};
      for (const auto& known_rule : rules) known.emplace_back(known_rule.key);
      to_setting(path, key.str(), node)
          .fail("unknown setting; " + suggestion(key.str(), known, "kvqd --help lists them"));
    }
  }
}

}  // namespace kvq
