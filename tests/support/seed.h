// The seed of a random test: fixed, or from KVQ_TEST_SEED. Whoever uses it prints it.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace kvq::testing {

inline std::uint64_t test_seed(std::uint64_t usual) {
  const char* text = std::getenv("KVQ_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : usual;
}

}  // namespace kvq::testing
