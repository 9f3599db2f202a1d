// The daemon's documents for human eyes.
//
// Invariant: pure text from JSON; whatever is shown here is in the --json output too.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvqctl {

using Json = nlohmann::ordered_json;

std::string state_of(const Json& session);  // "connected", "mapping", "waiting", "evicted" or "leaving"
std::string show_status(const Json& status);
std::string show_sessions(const Json& document);
std::string show_tenants(const Json& document);
std::string show_pages(const Json& document);
std::string show_quantize(const Json& report);
std::string show_set(const Json& changed);
std::string show_drain(const Json& report);
std::string show_evict(const Json& report);
std::string show_verify(const Json& report);
std::string show_evict_cached(const Json& report);
std::string show_compact(const Json& report);
std::string show_resize(const Json& report);
// One line each: when it happened (of this machine's clock, `now_ms` since 1970) and the event.
std::string show_events(const Json& document, std::int64_t now_ms);
std::string time_text(std::int64_t ms);  // "2026-11-30T08:12:01.123+0100"

}  // namespace kvqctl
