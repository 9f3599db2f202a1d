// The result of a topic, as tests/bench/results keeps it: who measured what where, ceilings, rows. The only writer of
// such files in C++; tools/bench writes the same document for the host's benchmarks.
//
// Invariant: a row is a line on stdout as soon as it is known, and the file is whole or not there: it is written at
// once, beside its place, and then renamed. A file that cannot be written is an error, said before the first row.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/bench/quantile.h"

namespace kvq::bench {

struct About {
  std::string topic, device, driver, date, commit, command;
};

// What a driver's number (13000) says: "CUDA 13.0".
std::string driver_name(int version);

class Rows {
 public:
  // `path` empty: no file. Throws std::runtime_error with the path when nothing can be written there.
  Rows(const About& about, std::string path);

  void ceiling(const char* name, double tb_s);
  void times(const std::string& name, const std::string& shape, const std::vector<double>& us,
             nlohmann::json more = nlohmann::json::object());
  void value(const std::string& name, const std::string& shape, double value, const std::string& unit);
  // Any other members. JSON has no NaN: such a number is an error of the benchmark, and refused.
  void document(const std::string& name, const std::string& shape, nlohmann::json more);

  const nlohmann::json& json() const { return json_; }
  void write() const;  // throws as the constructor does

 private:
  nlohmann::json json_;
  std::string path_;
};

}  // namespace kvq::bench
