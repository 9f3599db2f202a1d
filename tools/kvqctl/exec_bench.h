// kvqctl bench: the program kvq-bench takes over.
//
// Invariant: it returns only by a Failure.
#pragma once

#include "tools/kvqctl/options.h"

namespace kvqctl {

[[noreturn]] void exec_bench(const Options& options);

}  // namespace kvqctl
