// The operator's capability.
//
// Invariant: whoever holds an Admin capability was allowed to when asking for it; it is never given to any other peer.
// Replies are the JSON documents of docs/operations.md.
#pragma once

#include "daemon/rpc/sessions.h"

namespace kvq {

struct AdminParts {
  Sessions& sessions;
  std::uint64_t started_ms;
  std::function<std::size_t()> connections;
};

// For the peer `process`, which counts its capabilities. `parts` outlives it.
wire::Admin::Client make_admin(const AdminParts& parts, std::shared_ptr<Process> process);

}  // namespace kvq
