// What an operator asks for to make room: of all devices that have the tenant.
//
// Invariant: nothing is done with dry_run; without it one line of the log says what was asked for, and the next tick
// begins with it at once. Replies are the documents of docs/kvqctl.md.
#pragma once

#include <nlohmann/json.hpp>

#include "daemon/rpc/reply.h"

namespace kvq {

nlohmann::ordered_json evict_cached(const Devices& devices, const Where& where, std::uint64_t idle_ms, bool dry_run);
nlohmann::ordered_json compact_slabs(const Devices& devices, const Where& where, bool dry_run);
// The arena of the device of that name; empty: of all devices, or of none if one cannot.
std::optional<Refusal> resize_arenas(const Devices& devices, const std::string& name, std::uint64_t arena_bytes,
                                     bool dry_run, nlohmann::ordered_json& report);

}  // namespace kvq
