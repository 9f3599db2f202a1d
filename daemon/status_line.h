// kvqd in one line, for STATUS= of the service manager: what `systemctl status kvqd` shows.
#pragma once

#include <string>

#include "daemon/rpc/rpc.h"

namespace kvq {

// "2 sessions; host 53 % of 16.0 GiB, quantize": each device by the share of its arena in use, and its level.
std::string status_line(const NodeReport& report);

}  // namespace kvq
