// Configuration to parts: tenants, salts, groups.
#include "daemon/setup.h"

#include <grp.h>
#include <openssl/evp.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kvq/result.h"

namespace kvq {
namespace {

constexpr std::uint64_t kTableBytesPerPage = 128;  // of the largest table that grows with max_pages, roughly
constexpr char kSaltTag[] = "kvq salt 1";          // hashed with its final zero

void fill_random(void* out, std::size_t bytes) {
  const ssize_t got = ::getrandom(out, bytes, 0);
  if (got != static_cast<ssize_t>(bytes)) {
    throw StartupError(ExitCode::environment, std::string("getrandom: the kernel gave no random bytes: ") +
                                                  std::strerror(errno) +
                                                  "; give every tenant a salt in the configuration");
  }
}

// Salts of any length in the file become 32 bytes.
std::array<std::uint8_t, 32> digest_salt(const std::string& salt) {
  std::string text(kSaltTag, sizeof(kSaltTag));
  text += salt;
  std::array<std::uint8_t, 32> out{};
  unsigned size = 0;
  KVQ_ASSERT(EVP_Digest(text.data(), text.size(), out.data(), &size, EVP_sha256(), nullptr) == 1 && size == out.size());
  return out;
}

gid_t group_id(const std::string& name) {
  std::vector<char> buffer(1 << 16);
  group entry{};
  group* found = nullptr;
  const int error = ::getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found != nullptr) return found->gr_gid;
  throw StartupError(ExitCode::usage,
                     "admin_group = " + name + ": " +
                         (error == 0 ? "there is no such group; create it with groupadd, or name another"
                                     : std::string(std::strerror(error))));
}

TenantSpec tenant_spec(const TenantConfig& tenant) {
  TenantSpec spec;
  spec.name = tenant.name;
  spec.quota_bytes = tenant.quota_bytes;
  spec.share = tenant.share;
  spec.floor_dense = tenant.format_floor == Format::dense;
  spec.random_salt = tenant.salt.empty();
  spec.salt = tenant.salt.empty() ? random_salt() : digest_salt(tenant.salt);
  return spec;
}

}  // namespace

std::array<std::uint8_t, 32> random_salt() {
  std::array<std::uint8_t, 32> salt{};
  fill_random(salt.data(), salt.size());
  return salt;
}

void check_file_size(const Config& config) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const std::uint64_t tables = std::uint64_t{config.max_pages} * kTableBytesPerPage;
  const std::uint64_t needed = config.device == DeviceKind::cuda ? tables : std::max(config.slab_bytes, tables);
  if (limit.rlim_cur >= needed) return;
  throw StartupError(ExitCode::environment,
                     "RLIMIT_FSIZE is " + std::to_string(limit.rlim_cur) + " bytes, memfd files of " +
                         std::to_string(needed) +
                         " are needed; raise it (ulimit -f unlimited, or LimitFSIZE= in the unit)");
}

StoreConfig store_config(const Config& config) {
  StoreConfig out;
  out.max_pages = config.max_pages;
  out.max_sessions = config.max_sessions;
  out.step_deadline_ms = config.step_deadline_ms;
  out.reserve_slabs = kReserveSlabs;
  out.window_pages = config.residual_window_pages;
  out.cold_format = config.cold_format;
  out.watermarks = {config.watermarks.quantize_at, config.watermarks.evict_at, config.watermarks.refuse_at,
                    config.watermarks.relief};
  return out;
}

Configured configured(const Config& config) {
  Configured out;
  out.file = config.path;
  out.command_line = config.command_line;
  out.watermarks = store_config(config).watermarks;
  for (const TenantConfig& t : config.tenants) out.tenants[t.name] = {t.quota_bytes, static_cast<double>(t.share)};
  if (config.allow_unlisted) out.unlisted = Configured::Limits{config.unlisted_quota_bytes, TenantSpec{}.share};
  return out;
}

RpcOptions rpc_options(const Config& config, Store& store, const Device& device) {
  RpcOptions out;
  for (const TenantConfig& tenant : config.tenants) {
    out.rules.push_back({store.add_tenant(tenant_spec(tenant)), tenant.uids, tenant.gids});
  }
  if (config.allow_unlisted) {
    out.unlisted = TenantSpec{};
    out.unlisted->quota_bytes = config.unlisted_quota_bytes;
  }
  out.make_salt = random_salt;
  out.admin_uids = {::geteuid()};
  if (!config.admin_group.empty()) {
    out.admin_group = config.admin_group;
    out.admin_gid = group_id(config.admin_group);
  }
  out.range_bytes = device.most_bytes();
  out.slab_bytes = device.slab_bytes();
  out.device = device.name();
  if (out.device != "host") out.device_uuid = device.health().uuid;
  if (device.has_mirrors()) out.mirror_bytes = config.max_pages * sizeof(DirectoryEntry);
  out.cold_format = config.cold_format;
  out.step_deadline_ms = config.step_deadline_ms;
  out.max_sessions = config.max_sessions;
  return out;
}

std::string device_text(const Device& device) {
  const std::string uuid = device.health().uuid;
  return device.name() + (uuid.empty() ? "" : " " + uuid);
}

}  // namespace kvq
