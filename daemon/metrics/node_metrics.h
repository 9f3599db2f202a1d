// Which metrics kvqd has: docs/monitoring/README.md lists them for people, this writes them for Prometheus.
//
// Invariant: a pure function of the report that kvqctl's documents are made of, so both always agree. Every series is
// there, at zero, from the first text on; a tenant's end with it. Of each device the kinds of kvq_memory_bytes sum to
// kvq_arena_bytes.
#pragma once

#include <string>

#include "daemon/rpc/rpc.h"

namespace kvq {

std::string metrics_text(const NodeReport& report);

}  // namespace kvq
