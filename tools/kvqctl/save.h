// kvqctl set --save: the setting that kvqd has taken goes into the file that kvqd reads.
//
// Invariant: the file is the old one or the new one, never anything between, and the new one is one that kvqd's own
// parser takes with the command line that kvqd was started with. All failures are Failures that say what was not saved.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvqctl {

struct Saved {
  std::string file;
  std::string line;  // as it is in the file now
};

// `status`: kvqd's document. check_only: says what it would write, and writes nothing.
Saved save_setting(const nlohmann::ordered_json& status, const std::string& key, const std::string& value,
                   bool check_only);

}  // namespace kvqctl
