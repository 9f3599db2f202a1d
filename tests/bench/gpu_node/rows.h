// Result rows of one topic, as tests/bench/results keeps them: printed as a table, written as JSON.
#pragma once

#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvq::bench {

inline double quantile(std::vector<double> samples, double share) {
  std::sort(samples.begin(), samples.end());
  return samples.empty() ? 0
                         : samples[std::min(samples.size() - 1,
                                            static_cast<std::size_t>(share * static_cast<double>(samples.size())))];
}

class Rows {
 public:
  Rows(std::string topic, std::string device, std::string driver, std::string commit, std::string command,
       std::string date)
      : json_{{"topic", topic},
              {"device", device},
              {"driver", driver},
              {"date", date},
              {"commit", commit},
              {"command", command},
              {"rows", nlohmann::json::array()}} {}

  void ceiling(const char* name, double tb_s) { json_["ceilings"][name] = tb_s; }
  void times(const std::string& name, const std::string& shape, const std::vector<double>& us,
             nlohmann::json more = nlohmann::json::object()) {
    more.update({{"name", name},
                 {"shape", shape},
                 {"median_us", quantile(us, 0.5)},
                 {"p99_us", quantile(us, 0.99)},
                 {"samples", us.size()}});
    add(std::move(more));
  }
  void value(const std::string& name, const std::string& shape, double value, const std::string& unit) {
    add({{"name", name}, {"shape", shape}, {"value", value}, {"unit", unit}});
  }
  void document(const std::string& name, const std::string& shape, nlohmann::json more) {
    more.update({{"name", name}, {"shape", shape}});
    add(std::move(more));
  }
  void write(const std::string& folder) const {
    if (folder.empty()) return;
    std::ofstream(folder + "/" + json_["topic"].get<std::string>() + ".json") << json_.dump(1) << "\n";
  }

 private:
  void add(nlohmann::json row) {
    std::cout << row.dump() << std::endl;
    json_["rows"].push_back(std::move(row));
  }
  nlohmann::json json_;
};

}  // namespace kvq::bench
