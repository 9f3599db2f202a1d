// The measurements, each a row.
//
// Invariant: everything is private to one session and given back; what is compared with a plain copy was measured in
// the same run, with as many threads.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvq_bench {

struct BenchOptions {
  std::string socket;
  double seconds = 3;  // of all measurements together, about
};

// The document of `kvqctl bench`. Throws kvqctl::Failure.
nlohmann::ordered_json run_bench(const BenchOptions& options);

}  // namespace kvq_bench
