// What each verb does.
//
// Invariant: what is shown for eyes is in the JSON document, too. All throw Failure.
#pragma once

#include <string>

#include "tools/kvqctl/options.h"

namespace kvqctl {

void run_verb(const std::string& verb, const Options& options);

}  // namespace kvqctl
