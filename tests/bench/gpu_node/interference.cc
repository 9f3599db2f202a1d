// Two servers decode over one shared document, alone and while a third one's pages are appended, quantized, compacted
// and dropped without pause; outside MPS, with the servers in MPS, and with the worker in it, too.
#include <chrono>
#include <iostream>

#include "tests/bench/gpu_node/node.h"
#include "tests/bench/gpu_node/roles.h"

namespace kvq::bench {
namespace {

struct Setting {
  const char* name;
  bool servers_in_mps, worker_in_mps;
};

void measure(Rows& rows, const Setting& setting, const std::vector<std::string>& mps, bool churn, std::uint64_t ms,
             std::uint64_t steps) {
  NodeOptions options{.arena_bytes = "24GiB", .quantize_at = 0.25, .evict_at = 0.8, .refuse_at = 0.95, .relief = 0.05};
  if (setting.worker_in_mps) options.environment = mps;
  Node node(options);
  const std::vector<std::string> servers = setting.servers_in_mps ? mps : std::vector<std::string>{};
  const std::vector<std::string> common = {"--socket",         node.socket(), "--milliseconds",
                                           std::to_string(ms), "--steps",     std::to_string(steps)};
  std::vector<std::string> graphed = common;
  graphed.insert(graphed.end(), {"--graph", "1"});
  Server a("decoder", common, servers);
  a.await_ready();
  Server b("decoder", graphed, servers);
  b.await_ready();
  std::unique_ptr<Server> c;
  if (churn) {
    c = std::make_unique<Server>(
        "churner", std::vector<std::string>{"--socket", node.socket(), "--milliseconds", std::to_string(ms)}, servers);
    c->await_ready();
  }
  const std::string shape = std::string(setting.name) + (churn ? ", churn" : ", alone");
  for (Server* s : {&a, &b}) {
    nlohmann::json said = s->result();
    rows.document(s == &a ? "decode_eager" : "decode_graph", shape, std::move(said));
  }
  if (c == nullptr) return;
  const nlohmann::json said = c->result();
  const nlohmann::json status = node.ask("status");
  rows.document("churn", shape,
                {{"sequences", said["sequences"]},
                 {"refused", said["refused"]},
                 {"transcodes", status["transcodes"]["done"]},
                 {"transcodes_failed", status["transcodes"]["failed"]},
                 {"dropped_pages", status["dropped_pages"]}});
}

}  // namespace

void interference(Rows& rows, const Arguments& arguments) {
  const std::uint64_t ms = arguments.number("milliseconds", 8000), steps = arguments.number("steps", 1'000'000);
  const Mps mps;
  constexpr Setting kSettings[] = {
      {"no MPS", false, false}, {"servers in MPS", true, false}, {"servers and worker in MPS", true, true}};
  for (const Setting& setting : kSettings) {
    if (setting.servers_in_mps && !mps.works()) {
      std::cerr << "no MPS here: left out\n";
      break;
    }
    for (const bool churn : {false, true}) measure(rows, setting, mps.environment(), churn, ms, steps);
  }
}

}  // namespace kvq::bench
