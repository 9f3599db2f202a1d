// Which instruction sets this build and this CPU share.
//
// Invariant: computed once; compiled for the plain baseline, so it runs (and can say no) on any CPU.
#include "kernels/targets.h"

#include <hwy/targets.h>

#include <string>

#include "kernels/host_kernels.h"

namespace kvq {

const char* supported_targets() {
  static const std::string* const names = [] {
    auto* all = new std::string;
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
      if (target == HWY_SCALAR) continue;
      if (!all->empty()) *all += ' ';
      *all += hwy::TargetName(target);
    }
    return all;
  }();
  return names->c_str();
}

const char* best_target_name() {
  static const std::string* const best = [] {
    const std::string all = supported_targets();
    return new std::string(all.substr(0, all.find(' ')));
  }();
  return best->c_str();
}

bool has_vector_unit() { return *supported_targets() != '\0'; }

}  // namespace kvq
