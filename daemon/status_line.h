// The figures that a service manager shows of a running kvqd (STATUS=): `systemctl status kvqd`.
//
// Invariant: a pure function of the report that kvqctl's documents and the metrics are made of.
#pragma once

#include <string>

#include "daemon/rpc/rpc.h"

namespace kvq {

// "12 % of 4.0 GiB in use, calm, 2 sessions", of each device.
std::string figures_text(const NodeReport& report);

}  // namespace kvq
