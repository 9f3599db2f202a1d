// The operator's capability.
//
// Invariant: whoever holds an Admin capability was allowed to when asking for it; it is never given to any other peer.
// Replies are the JSON documents of docs/kvqctl.md; they and what is asked for are of all devices, unless one is
// named.
#pragma once

#include "daemon/rpc/devices.h"

namespace kvq {

struct AdminParts {
  const Devices& devices;
  std::uint64_t started_ms;
  std::function<std::size_t()> connections;
};

// For the peer `process`, which counts its capabilities. `parts` outlives it.
wire::Admin::Client make_admin(const AdminParts& parts, std::shared_ptr<Process> process);

}  // namespace kvq
