// In MPS a server killed in mid-kernel takes every other context of the GPU with it, the worker's too, and a process
// whose context was lost so gets no other: it must be started again. What that costs the survivor, whose pages outlive
// it.
#include <chrono>
#include <iostream>
#include <thread>

#include "tests/bench/gpu_node/node.h"
#include "tests/bench/gpu_node/roles.h"

namespace kvq::bench {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
}

// As a supervisor would: again and again until one gets a context.
nlohmann::json restart(Node& node, const Mps& mps, Clock::time_point killed, double& decoded_ms, int& tries) {
  for (tries = 1; ms_since(killed) < 20'000; ++tries) {
    Server server("restarted", {"--socket", node.socket()}, mps.environment());
    try {
      server.await("decoded");
      decoded_ms = ms_since(killed);
      return server.result();
    } catch (const std::exception&) {
    }
  }
  throw std::runtime_error("no server could start again");
}

// The worker of the next life serves: mirrors are written, slabs in place.
double await_worker(Node& node, std::uint64_t restarts_before, Clock::time_point killed) {
  while (ms_since(killed) < 20'000) {
    const nlohmann::json health = node.ask("status")["device_health"];
    if (health["worker_restarts"] > restarts_before && health["state"] == "ok") return ms_since(killed);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  throw std::runtime_error("the worker did not come back");
}

void crash(Rows& rows, Node& node, const Mps& mps) {
  const std::uint64_t restarts = node.ask("status")["device_health"]["worker_restarts"];
  Server survivor("decoder", {"--socket", node.socket(), "--milliseconds", "8000"}, mps.environment());
  survivor.await_ready();
  Server victim("stuck", {"--socket", node.socket()}, mps.environment());
  victim.await_ready();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto killed = Clock::now();
  victim.kill();
  bool lives = true;
  try {
    survivor.result();
  } catch (const std::exception&) {  // it has ended without one
    lives = false;
  }
  const double lost_ms = ms_since(killed);
  if (lives) {  // a driver that keeps one client's end from the others
    rows.value("survivor_decoded_on", "8192 tokens", lost_ms, "ms");
    return;
  }
  double decoded_ms = 0;
  int tries = 0;
  const nlohmann::json said = restart(node, mps, killed, decoded_ms, tries);
  const double worker_ms = await_worker(node, restarts, killed);
  rows.document("survivor_started_again", "8192 tokens",
                {{"lost_ms", lost_ms},
                 {"decoded_ms", decoded_ms},
                 {"tries", tries},
                 {"worker_back_ms", worker_ms},
                 {"cached_tokens", said["cached_tokens"]},
                 {"worst_error", said["worst_error"]}});
}

}  // namespace

void mps_crash(Rows& rows, const Arguments& arguments) {
  const Mps mps;
  if (!mps.works()) throw std::runtime_error("no MPS here: nvidia-cuda-mps-control does not start");
  NodeOptions options{.arena_bytes = "16GiB"};
  options.environment = mps.environment();
  Node node(options);
  for (std::uint64_t kill = 0; kill < arguments.number("kills", 2); ++kill) crash(rows, node, mps);
  const nlohmann::json status = node.ask("status");
  rows.document(
      "worker", "in MPS",
      {{"restarts", status["device_health"]["worker_restarts"]}, {"state", status["device_health"]["state"]}});
}

}  // namespace kvq::bench
