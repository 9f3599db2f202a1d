// What `kvqctl set` may change in a running daemon.
//
// Invariant: the table in setting.cc has every such setting. A value is checked in full before the store is touched; a
// refusal names the value and the valid range.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "daemon/rpc/registration.h"
#include "daemon/rpc/rpc.h"

namespace kvq {

// key: one of the daemon's (a watermark), or quota.TENANT (bytes, with KiB/MiB/GiB/TiB; 0: the whole arena) or
// share.TENANT. `changed` gets the setting as it now is; dry_run: as it would be.
std::optional<Refusal> change_setting(Store& store, const std::string& key, const std::string& value, bool dry_run,
                                      nlohmann::ordered_json& changed);

// Each of them: what holds, what the configuration says (null: nothing), and whether the two differ. A tenant that
// several stores have is the same in all.
// What now holds of `key`, which the store knows, is what is configured.
void note_saved(Configured& configured, const Store& store, const std::string& key);

nlohmann::ordered_json report_settings(const std::vector<const Store*>& stores, const Configured* configured);

// Whether a setting of that key is a tenant's.
bool names_tenant(const std::string& key);

std::string unknown_tenant(const std::vector<const Store*>& stores, const std::string& name);

}  // namespace kvq
