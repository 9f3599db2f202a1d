// Invariant: whatever goes wrong with the file leaves the one that was there as it is, and no piece of a new one.
#include "tests/bench/rows.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <utility>

namespace kvq::bench {
namespace {

std::string draft(const std::string& path) { return path + ".new"; }

[[noreturn]] void fail(const std::string& path) {
  const std::string why = std::strerror(errno);
  std::remove(draft(path).c_str());
  throw std::runtime_error(path + " cannot be written: " + why);
}

void write_draft(const std::string& path, const std::string& text) {
  std::ofstream file(draft(path), std::ios::trunc);
  file << text;
  file.close();  // a full disk is told here
  if (!file) fail(path);
}

}  // namespace

std::string driver_name(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Rows::Rows(const About& about, std::string path)
    : json_{{"topic", about.topic},
            {"device", about.device},
            {"driver", about.driver},
            {"date", about.date},
            {"commit", about.commit},
            {"command", about.command},
            {"ceilings", nlohmann::json::object()},
            {"rows", nlohmann::json::array()}},
      path_(std::move(path)) {
  if (path_.empty()) return;
  write_draft(path_, "");
  std::remove(draft(path_).c_str());
}

void Rows::ceiling(const char* name, double tb_s) { json_["ceilings"][name] = tb_s; }

void Rows::times(const std::string& name, const std::string& shape, const std::vector<double>& us,
                 nlohmann::json more) {
  more.update({{"median_us", quantile(us, 0.5)}, {"p99_us", quantile(us, 0.99)}, {"samples", us.size()}});
  document(name, shape, std::move(more));
}

void Rows::value(const std::string& name, const std::string& shape, double value, const std::string& unit) {
  document(name, shape, {{"value", value}, {"unit", unit}});
}

void Rows::document(const std::string& name, const std::string& shape, nlohmann::json more) {
  for (const auto& [member, value] : more.items()) {
    if (value.is_null() || (value.is_number_float() && !std::isfinite(value.get<double>()))) {
      throw std::runtime_error("row " + name + ", " + shape + ": " + member + " is not a number");
    }
  }
  more.update({{"name", name}, {"shape", shape}});
  std::cout << more.dump() << std::endl;
  json_["rows"].push_back(std::move(more));
}

void Rows::write() const {
  if (path_.empty()) return;
  write_draft(path_, json_.dump(1) + "\n");
  if (std::rename(draft(path_).c_str(), path_.c_str()) != 0) fail(path_);
}

}  // namespace kvq::bench
