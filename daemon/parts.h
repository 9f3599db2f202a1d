// One part of kvqd for each device that it serves: a device, its store, and what is kept of both.
//
// Invariant: start-up only. Parts know nothing of each other; what they share (names at the keeper, numbers of
// sessions) is given out here, bound to the device's UUID and to the state that it left, never to the order of GPUs. A
// device that cannot be had takes only its own state with it.
#pragma once

#include "daemon/choose_device.h"
#include "daemon/make_store.h"
#include "daemon/rpc/rpc.h"

namespace kvq {

struct Part {
  std::string uuid;  // empty: the host
  std::unique_ptr<PartKeeper> keeper;
  std::uint32_t session_range = 0;
  MadeStore made;
};

struct Parts {
  std::vector<Part> served;              // at least one
  std::vector<DeviceAbsent> not_served;  // only where the configuration names no GPU
};

struct PartsOptions {
  DeviceParts device;
  ServiceKeeper& keeper;
  StoreConfig store;
  std::function<void(std::size_t part, const SlabNotice&)> deliver;
};

// Throws StartupError when no part, or one that the configuration names, cannot be had.
Parts make_parts(const PartsOptions& options, const DeviceChoice& choice, Kept kept, std::uint64_t now_ms);

// For people: "host", or "cuda GPU-...", of all; and how their states came about.
std::string devices_text(const Parts& parts);
std::string states_text(const Parts& parts);

}  // namespace kvq
