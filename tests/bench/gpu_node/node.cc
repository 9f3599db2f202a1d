// Invariant: kvqctl is asked as an operator would, by its program.
#include "tests/bench/gpu_node/node.h"

#include <chrono>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "kernels/cuda/vmm.h"
#include "tests/support/programs.h"

namespace kvq::bench {
namespace {

std::string settings(const NodeOptions& o) {
  const auto gpus = cuda::visible_gpus();  // kvqd serves the one that this process and its servers use
  if (!gpus) throw std::runtime_error(gpus.error().context);
  std::ostringstream out;
  out << "device = \"" << gpus->front().uuid << "\"\narena_bytes = \"" << o.arena_bytes << "\"\nslab_bytes = \""
      << o.slab_bytes << "\"\nmax_pages = " << o.max_pages << "\nlog_level = \"info\"\nquantize_at = " << o.quantize_at
      << "\nresidual_window_pages = " << o.residual_window_pages << "\nevict_at = " << o.evict_at
      << "\nrefuse_at = " << o.refuse_at << "\nrelief = " << o.relief << "\n";
  return out.str();
}

}  // namespace

Node::Node(const NodeOptions& options) : daemon_(settings(options), options.environment) {}

nlohmann::json Node::ask(const std::string& command) const {
  const std::string line = test::program_path(KVQCTL_PATH) + " --socket " + socket() + " " + command + " --json 2>&1";
  FILE* pipe = ::popen(line.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot start " + line);
  std::string text;
  for (char buffer[4096]; const std::size_t got = std::fread(buffer, 1, sizeof buffer, pipe);) text.append(buffer, got);
  if (::pclose(pipe) != 0) throw std::runtime_error(line + ": " + text);
  return nlohmann::json::parse(text);
}

void Node::quantize_all() const {
  ask("quantize --idle 0");
  for (int i = 0; i < 100; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (ask("status")["transcodes"]["in_flight"] == 0 && ask("quantize --idle 0 --dry-run")["pages"] == 0) return;
  }
  throw std::runtime_error("the document is not quantized after 10 s");
}

}  // namespace kvq::bench
