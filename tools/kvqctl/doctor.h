// kvqctl doctor: facts of this machine, and what they mean.
//
// Invariant: it changes nothing and needs nothing: what cannot be read is a fact that is not there.
#pragma once

#include "tools/kvqctl/options.h"

namespace kvqctl {

void doctor(const Options& options);  // throws Failure(kUnwell) when something is bad

}  // namespace kvqctl
