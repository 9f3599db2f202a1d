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

}  // namespace kvqctl
