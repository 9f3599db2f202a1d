// Options of a benchmark's command line: --NAME VALUE, in any order.
//
// Invariant: what is not understood is an error, never left out: a benchmark takes minutes, and its result says what
// it was asked.
#pragma once

#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvq::bench {

class Arguments {
 public:
  Arguments(int argc, const char* const* argv) {
    for (int i = 1; i < argc; i += 2) {
      const std::string name = argv[i];
      if (name.size() < 3 || name.rfind("--", 0) != 0) throw std::invalid_argument("not an option: " + name);
      if (i + 1 == argc) throw std::invalid_argument(name + " has no value");
      values_.emplace_back(name.substr(2), argv[i + 1]);
    }
  }

  std::string text(const std::string& name, const std::string& otherwise = "") const {
    for (const auto& [n, value] : values_) {
      if (n == name) return value;
    }
    return otherwise;
  }
  std::uint64_t number(const std::string& name, std::uint64_t otherwise) const {
    const std::string value = text(name, std::to_string(otherwise));
    std::uint64_t out = 0;
    const char* end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, out);
    if (error != std::errc{} || stop != end) throw std::invalid_argument("--" + name + ": not a number: " + value);
    return out;
  }

  // How to get the result again. Where it is written says nothing about it.
  std::string command(const std::string& program) const {
    std::string out = program;
    for (const auto& [name, value] : values_) {
      if (name != "out") out.append(" --").append(name).append(" ").append(value);
    }
    return out;
  }

 private:
  std::vector<std::pair<std::string, std::string>> values_;
};

}  // namespace kvq::bench
