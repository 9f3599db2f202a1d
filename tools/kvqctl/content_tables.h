// What the cache holds, for human eyes.
//
// Invariant: pure text from JSON; whatever is shown here is in the --json output too.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvqctl {

std::string show_sequences(const nlohmann::ordered_json& document);
std::string show_prefix(const nlohmann::ordered_json& document);

}  // namespace kvqctl
