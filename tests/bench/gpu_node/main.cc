// Benchmarks of a whole node on a GPU.
//   kvq_bench_gpu_node --topic million_tokens|recovery|latencies|interference|mps_crash [--out FOLDER] [--commit C]
//   [--date D] [...]
#include <cuda_runtime_api.h>

#include <functional>

#include "tests/bench/gpu_node/llama.h"
#include "tests/bench/gpu_node/roles.h"

namespace kvq::bench {
namespace {

int run(int argc, char** argv) {
  std::map<std::string, std::string> values;
  std::string command = "kvq_bench_gpu_node";
  for (int i = 1; i + 1 < argc; i += 2) {
    values[std::string(argv[i]).substr(2)] = argv[i + 1];
    if (std::string(argv[i]) != "--out") command += std::string(" ") + argv[i] + " " + argv[i + 1];
  }
  const Arguments arguments(values);
  if (arguments.text("role", "") == "decoder") return decoder(arguments);
  if (arguments.text("role", "") == "churner") return churner(arguments);
  if (arguments.text("role", "") == "stuck") return stuck(arguments);
  if (arguments.text("role", "") == "restarted") return restarted(arguments);
  const std::map<std::string, std::function<void(Rows&, const Arguments&)>> topics = {
      {"million_tokens", million_tokens},
      {"recovery", recovery},
      {"latencies", latencies},
      {"interference", interference},
      {"mps_crash", mps_crash}};
  const std::string topic = arguments.text("topic", "");
  const auto found = topics.find(topic);
  if (found == topics.end()) {
    std::cerr << "--topic is one of million_tokens, recovery, latencies, interference, mps_crash, not \"" << topic
              << "\"\n";
    return 2;
  }
  cudaDeviceProp device{};
  int driver = 0;
  must(cudaGetDeviceProperties(&device, 0), "no GPU");
  cudaDriverGetVersion(&driver);
  Rows rows(topic == "recovery" || topic == "latencies" ? "gpu_" + topic : topic, device.name, std::to_string(driver),
            arguments.text("commit", ""), command, arguments.text("date", ""));
  found->second(rows, arguments);
  rows.write(arguments.text("out", ""));
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
