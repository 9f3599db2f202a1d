// Lets tests kill kvqd at a point of kvq/kill_point.h, by the environment.
//
// Invariant: does nothing in builds without KVQ_KILL_POINTS, which are those that are installed.
#pragma once

namespace kvq {

void kill_where_told();

}  // namespace kvq
