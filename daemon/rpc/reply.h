// What the operator's calls have in common: which devices and tenants one is about, and the document it answers.
//
// Invariant: a name that no device or tenant has is refused with those there are; nothing was looked at or changed
// then.
#pragma once

#include <kj/string.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/rpc/devices.h"
#include "kvq/protocol.capnp.h"

namespace kvq {

// The devices that have a tenant, and its id there; nothing for all tenants.
using Where = std::vector<std::pair<ServedDevice*, std::optional<TenantId>>>;

// Empty names: all. False: `status` says what is wrong.
bool find_where(const Devices& devices, const std::string& tenant, const std::string& device, Where& where,
                wire::Status::Builder status);

// A name from a configuration file may hold any bytes: what is not UTF-8 is replaced, never thrown.
kj::String json_text(const nlohmann::ordered_json& json);

// Each entry with the name of its device.
void append(nlohmann::ordered_json& list, const nlohmann::ordered_json& more, const ServedDevice& device);

}  // namespace kvq
