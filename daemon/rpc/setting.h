// What `kvqctl set` may change in a running daemon.
//
// Invariant: a value is checked in full before the store is touched; a refusal names the value and the valid range.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "daemon/rpc/registration.h"

namespace kvq {

// key: quantize_at, evict_at, refuse_at, relief, quota.TENANT (bytes, with KiB/MiB/GiB/TiB; 0: the whole arena) or
// share.TENANT. `changed` gets the setting as it now is.
std::optional<Refusal> change_setting(Store& store, const std::string& key, const std::string& value,
                                      nlohmann::ordered_json& changed);

// Whether a setting of that key is a tenant's.
bool names_tenant(const std::string& key);

std::string unknown_tenant(const std::vector<const Store*>& stores, const std::string& name);

}  // namespace kvq
