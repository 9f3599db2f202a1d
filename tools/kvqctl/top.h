// kvqctl top.
//
// Invariant: what it shows is the model's, what it asks is the feed's; this joins both to the terminal until a key or a
// signal ends it.
#pragma once

#include <string>

namespace kvqctl {

struct TopOptions {
  std::string socket;
  double interval_s = 1;
  bool colours = true;  // where the terminal has them and NO_COLOR is not set
};

// Throws Failure: no terminal, or kvqd refuses this user. A kvqd that does not answer is waited for.
void top(const TopOptions& options);

}  // namespace kvqctl
