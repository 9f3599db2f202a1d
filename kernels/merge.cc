// Joining partial attention results.
//
// Invariant: the empty state is lse = -inf; its output is never read, so it may be uninitialized.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "kernels/host_kernels.h"

namespace kvq {

// Bound that the test checks: |error| <= 2^-20 * max(|out_a|, |out_b|), lse within 2^-22 * max(1, |lse|).
void merge_states(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint32_t rows,
                  std::uint32_t head_dim) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  for (std::uint32_t r = 0; r < rows; ++r) {
    float* a = out_a + std::size_t{r} * head_dim;
    const float* b = out_b + std::size_t{r} * head_dim;
    if (lse_b[r] == kEmpty) {
      if (lse_a[r] == kEmpty) std::memset(a, 0, sizeof(float) * head_dim);
      continue;
    }
    if (lse_a[r] == kEmpty) {
      std::memcpy(a, b, sizeof(float) * head_dim);
      lse_a[r] = lse_b[r];
      continue;
    }
    const float top = lse_a[r] > lse_b[r] ? lse_a[r] : lse_b[r];
    const float weight_a = std::exp(lse_a[r] - top), weight_b = std::exp(lse_b[r] - top);
    const float sum = weight_a + weight_b;
    for (std::uint32_t c = 0; c < head_dim; ++c) a[c] = (a[c] * weight_a + b[c] * weight_b) / sum;
    lse_a[r] = top + std::log(sum);
  }
}

}  // namespace kvq
