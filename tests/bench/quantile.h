// The sample below which a share of all samples lies: 0.5 is the median, 1 the largest.
//
// Invariant: always one of the samples, never a mean of two; of an even number the median is the upper one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvq::bench {

inline double quantile(std::vector<double> samples, double share) {
  if (samples.empty()) return 0;
  const auto index = static_cast<std::size_t>(share * static_cast<double>(samples.size()));
  const auto wanted = samples.begin() + static_cast<std::ptrdiff_t>(std::min(index, samples.size() - 1));
  std::nth_element(samples.begin(), wanted, samples.end());
  return *wanted;
}

}  // namespace kvq::bench
