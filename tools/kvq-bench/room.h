// Whether there is room for a bench, and how much.
//
// Invariant: what find_room allows takes no device beyond its mark quantize_at and no tenant beyond its quota's, so
// that nobody's pages are rewritten or dropped for it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvq_bench {

using Json = nlohmann::ordered_json;

// The part of the document status that is of the host. Failure: kvqd serves no host device.
const Json& host_of(const Json& status);

// Bytes of dense pages that the bench may write, before it has a session; at most half of what is free below the mark,
// since the quantized copies need room, too. Failure: not even a few pages.
std::uint64_t bytes_of_arena(const Json& host);

struct TenantRoom {
  std::uint64_t bytes = 0;  // as above, with the tenant's quota
  bool alone = false;       // nothing of the tenant is anybody else's
};
// With the bench's own session as its only one.
TenantRoom room_of_tenant(const Json& host, const std::string& tenant, std::uint64_t bytes);

const Json* find_tenant(const Json& host, const std::string& name);  // null: none

}  // namespace kvq_bench
