// Invariant: heads are independent, so each has a thread; sums run in the order of tokens.
#include "tests/bench/gpu_node/reference.h"

#include <cmath>
#include <limits>
#include <thread>

#include "kernels/half.h"

namespace kvq::bench {
namespace {

constexpr std::uint32_t kGroup = kQueryHeads / kKvHeads;

void attend_head(std::uint32_t seed, std::uint32_t layer, std::uint32_t head, std::uint64_t tokens,
                 const std::uint16_t* queries, double* out) {
  std::vector<double> score(kGroup * tokens);
  for (std::uint64_t t = 0; t < tokens; ++t) {
    for (std::uint32_t c = 0; c < kHeadDim; ++c) {
      const double k = kv_value(seed, layer, 0, head, t, c);
      for (std::uint32_t g = 0; g < kGroup; ++g) {
        score[g * tokens + t] += k * half_to_float(queries[(head * kGroup + g) * kHeadDim + c]);
      }
    }
  }
  std::vector<double> sum(kGroup);
  for (std::uint32_t g = 0; g < kGroup; ++g) {
    double top = -std::numeric_limits<double>::infinity();
    double* s = &score[g * tokens];
    for (std::uint64_t t = 0; t < tokens; ++t) top = std::max(top, s[t] /= std::sqrt(double{kHeadDim}));
    for (std::uint64_t t = 0; t < tokens; ++t) sum[g] += s[t] = std::exp(s[t] - top);
  }
  for (std::uint64_t t = 0; t < tokens; ++t) {
    for (std::uint32_t c = 0; c < kHeadDim; ++c) {
      const double v = kv_value(seed, layer, 1, head, t, c);
      for (std::uint32_t g = 0; g < kGroup; ++g) {
        out[(head * kGroup + g) * kHeadDim + c] += score[g * tokens + t] / sum[g] * v;
      }
    }
  }
}

}  // namespace

std::vector<double> reference(std::uint32_t seed, std::uint32_t layer, std::uint64_t tokens,
                              const std::uint16_t* queries) {
  std::vector<double> out(kQueryHeads * kHeadDim);
  std::vector<std::thread> workers;
  for (std::uint32_t head = 0; head < kKvHeads; ++head) {
    workers.emplace_back(attend_head, seed, layer, head, tokens, queries, out.data());
  }
  for (std::thread& w : workers) w.join();
  return out;
}

std::vector<float> reference_of_layers(std::uint32_t seed, std::uint64_t tokens, const std::uint16_t* queries) {
  std::vector<float> out;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const std::vector<double> one = reference(seed, layer, tokens, queries);
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

double row_error(const float* got, const std::vector<double>& wanted) {
  double worst = 0;
  for (std::size_t row = 0; row < wanted.size(); row += kHeadDim) {
    double error = 0, norm = 0;
    for (std::size_t i = row; i < row + kHeadDim; ++i) {
      error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
      norm += wanted[i] * wanted[i];
    }
    const double relative = std::sqrt(error / norm);
    worst = relative <= std::numeric_limits<double>::max() ? std::max(worst, relative)
                                                           : std::numeric_limits<double>::infinity();
  }
  return worst;
}

}  // namespace kvq::bench
