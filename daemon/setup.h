// From the configuration to what the rooms are built with.
//
// Invariant: start-up only. Whatever is wrong throws StartupError with one line that names cause and fix.
#pragma once

#include <array>
#include <cstdint>

#include "daemon/config.h"
#include "daemon/rpc/rpc.h"
#include "daemon/store.h"

namespace kvq {

// Slabs and tables are memory files, to which the limit on file sizes applies.
void check_file_size(const Config& config);

StoreConfig store_config(const Config& config);

// For operators, beside what holds while kvqd runs.
Configured configured(const Config& config);

// Adds the configured tenants to the store and states who belongs to which, who administers and what clients are told.
RpcOptions rpc_options(const Config& config, Store& store, const Device& device);

// "host", or "cuda GPU-...": for people.
std::string device_text(const Device& device);

// 32 bytes from the kernel. A tenant without a salt in the configuration gets new ones each time the daemon starts.
std::array<std::uint8_t, 32> random_salt();

}  // namespace kvq
