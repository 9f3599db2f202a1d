// What this program measures: one function a topic, one result file each.
#pragma once

#include "tests/bench/arguments.h"
#include "tests/bench/rows.h"

namespace kvq::bench {

void million_tokens(Rows& rows, const Arguments& arguments);
void recovery(Rows& rows, const Arguments& arguments);
void latencies(Rows& rows, const Arguments& arguments);
void mps_crash(Rows& rows, const Arguments& arguments);
void interference(Rows& rows, const Arguments& arguments);
void pacing(Rows& rows, const Arguments& arguments);

}  // namespace kvq::bench
