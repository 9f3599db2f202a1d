// Invariant: ragged lengths follow from a fixed seed.
#include "tests/bench/gpu_attend/shapes.h"

#include <cmath>
#include <functional>
#include <map>
#include <stdexcept>

namespace kvq::bench {
namespace {

std::vector<std::int32_t> alike(std::size_t sequences, std::int32_t length) {
  return std::vector<std::int32_t>(sequences, length);
}

std::vector<Shape> decode() {
  std::vector<Shape> out;
  constexpr std::int32_t kShapes[][2] = {{1, 4096},  {1, 16384}, {1, 65536}, {1, 131072}, {1, 1048576},
                                         {8, 32768}, {32, 8192}, {64, 4096}, {128, 1024}};
  for (const auto& [sequences, length] : kShapes) out.push_back({.lengths = alike(sequences, length)});
  return out;
}

std::vector<Shape> heads() {
  std::vector<Shape> out;
  for (const std::uint16_t head_dim : {64, 128, 256}) {
    for (const std::uint32_t group : {1u, 2u, 4u, 7u, 8u, 16u}) {
      out.push_back({.lengths = alike(8, 32768), .head_dim = head_dim, .group = group});
    }
  }
  return out;
}

std::vector<Shape> formats() {
  return {{.lengths = alike(1, 131072)}, {.lengths = alike(8, 32768)}, {.lengths = alike(64, 4096)}};
}

// From 100 to 100,000 tokens, as many short ones as long ones by the logarithm.
std::vector<Shape> ragged() {
  std::vector<Shape> out;
  for (const std::size_t sequences : {std::size_t{16}, std::size_t{64}}) {
    std::mt19937_64 random(7);
    std::uniform_real_distribution<> decades(2, 5);
    Shape shape;
    for (std::size_t s = 0; s < sequences; ++s) {
      shape.lengths.push_back(static_cast<std::int32_t>(std::pow(10, decades(random))));
    }
    out.push_back(shape);
  }
  return out;
}

std::vector<Shape> verify() {
  std::vector<Shape> out;
  for (const std::uint32_t queries : {2u, 4u, 8u, 16u}) out.push_back({.lengths = alike(8, 32768), .queries = queries});
  return out;
}

std::vector<Shape> prefill() {
  std::vector<Shape> out;
  for (const std::int32_t history : {8192, 32768, 131072}) {
    for (const std::uint32_t queries : {512u, 2048u, 8192u}) {
      out.push_back({.lengths = {history + static_cast<std::int32_t>(queries)}, .queries = queries});
    }
  }
  return out;
}

const std::map<std::string, std::function<std::vector<Shape>()>>& topics() {
  static const std::map<std::string, std::function<std::vector<Shape>()>> all = {
      {"decode", decode}, {"heads", heads},   {"formats", formats},
      {"ragged", ragged}, {"verify", verify}, {"prefill", prefill}};
  return all;
}

}  // namespace

std::string topic_names() { return "decode, heads, formats, ragged, verify, prefill, step"; }

std::vector<Shape> shapes_of(const std::string& topic) {
  const auto found = topics().find(topic);
  if (found == topics().end()) throw std::invalid_argument("no topic " + topic + ": one of " + topic_names());
  return found->second();
}

std::string Step::text() const {
  const std::string of = std::to_string(tokens) + " tokens, " + std::to_string(kStepLayers) + " layers";
  if (sequences != 0) return std::to_string(sequences) + " of " + of;
  return "what fits in " + std::to_string(std::lround(kv_bytes / 1e9)) + " GB of " + of;
}

std::vector<Step> steps(double kv_bytes) {
  std::vector<Step> out = {{131072, 8, 0}, {1048576, 1, 0}};
  for (const std::int32_t tokens : {32768, 131072, 1048576}) out.push_back({tokens, 0, kv_bytes});
  return out;
}

nlohmann::json list_of(const std::string& topic, double kv_bytes) {
  nlohmann::json out = nlohmann::json::array();
  if (topic == "step") {
    for (const Step& step : steps(kv_bytes)) {
      const Shape usual;
      out.push_back({{"shape", step.text()},
                     {"tokens", step.tokens},
                     {"sequences", step.sequences},
                     {"kv_bytes", step.kv_bytes},
                     {"layers", kStepLayers},
                     {"kv_heads", usual.kv_heads},
                     {"group", usual.group},
                     {"head_dim", usual.head_dim}});
    }
    return out;
  }
  for (const Shape& shape : shapes_of(topic)) {
    out.push_back({{"shape", shape.text()},
                   {"lengths", shape.lengths},
                   {"queries", shape.queries},
                   {"kv_heads", shape.kv_heads},
                   {"group", shape.group},
                   {"head_dim", shape.head_dim}});
  }
  return out;
}

}  // namespace kvq::bench
