// Times of one thing done many times, as counters of a benchmark: what tools/bench takes for the row.
//
// Invariant: percentiles are of the samples themselves (no averages of averages); the row's median is theirs.
#pragma once

#include <benchmark/benchmark.h>

#include <chrono>
#include <vector>

#include "tests/bench/quantile.h"

namespace kvq {

using Clock = std::chrono::steady_clock;

inline double us_since(Clock::time_point began) {
  return std::chrono::duration<double, std::micro>(Clock::now() - began).count();
}

class Samples {
 public:
  void add(double us) { us_.push_back(us); }
  std::size_t size() const { return us_.size(); }
  double at(double share) const { return bench::quantile(us_, share); }
  void report(benchmark::State& state) {
    state.SetIterationTime(at(0.5) * 1e-6);
    state.counters["median_us"] = at(0.5);
    state.counters["p99_us"] = at(0.99);
    state.counters["max_us"] = at(1);
    state.counters["samples"] = static_cast<double>(size());
  }

 private:
  std::vector<double> us_;
};

}  // namespace kvq
