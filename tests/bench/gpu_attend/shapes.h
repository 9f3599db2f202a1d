// What each topic measures: one list, for kvq's own rows and for other kernels that are timed beside them.
//
// Invariant: a shape's text says it wholly within its topic, so that rows of equal text are of the same work.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/bench/gpu_attend/workload.h"

namespace kvq::bench {

// "decode, heads, ...", as a message names them.
std::string topic_names();

// Throws std::invalid_argument for what is no topic.
std::vector<Shape> shapes_of(const std::string& topic);

// A decode step of a whole model: so many sequences of one length, or as many as have room in so many bytes.
struct Step {
  std::int32_t tokens;
  std::uint32_t sequences;  // 0: as many as fit
  double kv_bytes;

  std::string text() const;
};
inline constexpr std::uint16_t kStepLayers = 32;
std::vector<Step> steps(double kv_bytes);

// The topic's shapes as JSON: text, lengths, heads, queries; steps with their layers and bytes.
nlohmann::json list_of(const std::string& topic, double kv_bytes);

}  // namespace kvq::bench
