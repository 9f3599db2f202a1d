// The TOML file: flat keys of config_setting.h, and one [[tenants]] table per tenant.
#pragma once

#include <string>

#include "daemon/config_setting.h"

namespace kvq {

// Reads `path` into `config` and notes in `origins` where each key stood (tenants as "tenants[i].key"). Throws
// StartupError naming file and line.
void read_config_file(const std::string& path, Config& config, Origins& origins);

}  // namespace kvq
