// What changes when kvqd reads its configuration again (SIGHUP).
//
// Invariant: the stores afterwards hold what `next` says of every setting that can change while kvqd serves, also where
// `kvqctl set` had said otherwise. All other settings stay as they were at the start, and are named.
#pragma once

#include <span>
#include <string>

#include "daemon/config.h"
#include "daemon/store.h"

namespace kvq {

// `started`: what kvqd started with. Returns the event's line: what changed, what needs a restart, what was refused.
std::string reload(const Config& started, const Config& next, std::span<Store* const> stores);

}  // namespace kvq
