// Benchmarks of a whole node on a GPU.
//   kvq_bench_gpu_node --topic million_tokens|recovery|latencies|interference|pacing|mps_crash [--out FOLDER]
//   [--commit C] [--date D] [...]
#include <iostream>
#include <map>

#include "tests/bench/about_gpu.h"
#include "tests/bench/gpu_node/llama.h"
#include "tests/bench/gpu_node/roles.h"

namespace kvq::bench {
namespace {

using Role = int (*)(const Arguments&);
using Topic = void (*)(Rows&, const Arguments&);

// In tests/bench/results the host's topics of the same names lie beside these.
std::string file_topic(const std::string& topic) {
  return topic == "recovery" || topic == "latencies" ? "gpu_" + topic : topic;
}

int run(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const std::map<std::string, Role> roles = {
      {"decoder", decoder}, {"churner", churner}, {"source", source}, {"stuck", stuck}, {"restarted", restarted}};
  if (const std::string role = arguments.text("role"); !role.empty()) return roles.at(role)(arguments);
  const std::map<std::string, Topic> topics = {
      {"million_tokens", million_tokens}, {"recovery", recovery}, {"latencies", latencies},
      {"interference", interference},     {"pacing", pacing},     {"mps_crash", mps_crash}};
  const std::string topic = arguments.text("topic"), folder = arguments.text("out");
  const auto found = topics.find(topic);
  if (found == topics.end()) {
    std::cerr << "--topic is one of million_tokens, recovery, latencies, interference, pacing, mps_crash, not \""
              << topic << "\"\n";
    return 2;
  }
  const std::string name = file_topic(topic);
  Rows rows(about_gpu(name, "kvq_bench_gpu_node", arguments), folder.empty() ? "" : folder + "/" + name + ".json");
  found->second(rows, arguments);
  rows.write();
  return 0;
}

}  // namespace
}  // namespace kvq::bench

int main(int argc, char** argv) {
  try {
    return kvq::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "kvq_bench_gpu_node: " << error.what() << "\n";
    return 1;
  }
}
