// Slabs are what is counted: a page needs a whole one when there is no other place for it.
#include "tools/kvq-bench/room.h"

#include <algorithm>

#include "tools/kvq-bench/content.h"
#include "tools/kvqctl/admin_client.h"

namespace kvq_bench {
namespace {

using kvqctl::Failure;

constexpr std::uint64_t kMostBytes = 32ull << 20;              // and half as much for the quantized pages, at most
constexpr std::uint64_t kLeastBytes = 8 * 64 * 2 * kRowBytes;  // eight pages

// Of `slabs` slabs, so many are below the mark and not used: half for dense pages, half for quantized ones.
std::uint64_t half_below(double at, std::uint64_t slabs, std::uint64_t used, std::uint64_t slab_bytes) {
  const auto below = static_cast<std::uint64_t>(at * static_cast<double>(slabs));
  const std::uint64_t spare = below > used + 1 ? below - used - 1 : 0;
  return spare / 2 * slab_bytes;
}

std::uint64_t checked(std::uint64_t bytes, const std::string& of_what) {
  if (bytes >= kLeastBytes) return std::min(bytes, kMostBytes);
  throw Failure(kvqctl::kRefused, "no room: " + of_what + " has less than " + std::to_string(2 * kLeastBytes >> 20) +
                                      " MiB free below quantize_at, and a bench must not push out what others cached; "
                                      "try again when less is used (kvqctl tenants)");
}

}  // namespace

const Json& host_of(const Json& status) {
  if (!status.contains("devices")) {
    if (status.at("device") == "host") return status;
  } else {
    for (const Json& device : status.at("devices")) {
      if (device.at("device") == "host") return device;
    }
  }
  throw Failure(kvqctl::kRefused, "this kvqd keeps its pages on a GPU; bench measures a host device");
}

std::uint64_t bytes_of_arena(const Json& host) {
  const Json& arena = host.at("arena");
  const std::uint64_t usable = arena.at("slabs").get<std::uint64_t>() - arena.at("slabs_reserved").get<std::uint64_t>();
  return checked(
      half_below(host.at("watermarks").at("quantize_at"), usable, arena.at("slabs_used"), arena.at("slab_bytes")),
      "the arena");
}

const Json* find_tenant(const Json& host, const std::string& name) {
  for (const Json& tenant : host.at("tenants")) {
    if (tenant.at("name") == name) return &tenant;
  }
  return nullptr;
}

TenantRoom room_of_tenant(const Json& host, const std::string& name, std::uint64_t bytes) {
  const Json* tenant = find_tenant(host, name);
  if (tenant == nullptr) throw Failure(kvqctl::kNoDaemon, "tenant " + name + " is gone; try again");
  const auto quota = tenant->at("quota_bytes").get<std::uint64_t>();
  if (quota != 0) {
    const auto slab_bytes = host.at("arena").at("slab_bytes").get<std::uint64_t>();
    const std::uint64_t used = tenant->at("slab_bytes").get<std::uint64_t>() / slab_bytes;
    const double at = host.at("watermarks").at("quantize_at");
    bytes = std::min(bytes, checked(half_below(at, quota / slab_bytes, used, slab_bytes), "the quota of " + name));
  }
  const bool alone = tenant->at("sessions") == 1 && tenant->at("sealed_pages") == 0;
  return {bytes, alone};
}

}  // namespace kvq_bench
