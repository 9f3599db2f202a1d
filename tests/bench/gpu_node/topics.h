// What this program measures: one function a topic, one result file each.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tests/bench/gpu_node/rows.h"

namespace kvq::bench {

// Options of the command line: --NAME VALUE.
class Arguments {
 public:
  explicit Arguments(std::map<std::string, std::string> values) : values_(std::move(values)) {}
  std::string text(const std::string& name, const std::string& otherwise) const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  std::uint64_t number(const std::string& name, std::uint64_t otherwise) const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : std::stoull(found->second);
  }

 private:
  std::map<std::string, std::string> values_;
};

void million_tokens(Rows& rows, const Arguments& arguments);
void recovery(Rows& rows, const Arguments& arguments);
void latencies(Rows& rows, const Arguments& arguments);
void mps_crash(Rows& rows, const Arguments& arguments);
void interference(Rows& rows, const Arguments& arguments);

}  // namespace kvq::bench
