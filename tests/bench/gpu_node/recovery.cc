// kvqd and its worker killed at once with an arena full of pages, while servers decode.
#include <signal.h>

#include <chrono>
#include <iostream>
#include <thread>

#include "tests/bench/gpu_node/llama.h"
#include "tests/bench/gpu_node/node.h"
#include "tests/bench/gpu_node/roles.h"

namespace kvq::bench {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
}

// Every sealed page of now, once each: how many, and how many differ from their checksums. A new kvqd begins a pass of
// its own, and one that is asked for meanwhile would be counted together with it.
std::pair<std::uint64_t, std::uint64_t> verify(Node& node) {
  const auto until = Clock::now() + std::chrono::minutes(2);
  while (node.ask("status")["verify"]["running"]) {
    if (Clock::now() > until) throw std::runtime_error("a pass over all pages does not end");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const nlohmann::json said = node.ask("verify --deadline-ms 120000");
  return {said["pages_total"], said["bad"]};
}

}  // namespace

void recovery(Rows& rows, const Arguments& arguments) {
  const std::uint64_t pages = arguments.number("pages", 12'000);
  const std::uint64_t per_sequence = 512 * 64;
  Node node({.arena_bytes = arguments.text("arena", "100GiB")});
  Server a("decoder", {"--socket", node.socket(), "--milliseconds", "20000"});
  a.await_ready();
  Server b("decoder", {"--socket", node.socket(), "--milliseconds", "20000", "--graph", "1"});
  b.await_ready();
  Llama filler(node.socket(), 2);
  std::vector<Sequence> sequences;
  const auto filling = Clock::now();
  for (std::uint64_t made = 0; made + 512 <= pages; made += 512) {
    sequences.push_back(filler.open(0));
    filler.grow(sequences.back(), 0, per_sequence, (made + 1) * 100'000);
  }
  const std::string shape = std::to_string(pages) + " pages";
  rows.value("fill", shape, ms_since(filling) / 1e3, "s");
  const auto before = verify(node);
  const pid_t daemon = node.daemon().pid();
  const std::string worker = "pkill -9 -P " + std::to_string(daemon) + " kvqd-gpu";
  const auto killed = Clock::now();
  ::kill(daemon, SIGSTOP);  // so that it starts no other worker meanwhile
  [[maybe_unused]] const int sent = std::system(worker.c_str());
  ::kill(daemon, SIGKILL);
  node.daemon().await_lives(2);
  rows.value("killed_to_serving", shape, ms_since(killed), "ms");
  const nlohmann::json status = node.ask("status");
  rows.value("adopted_pages", shape, status["adopt"]["pages"], "pages");
  rows.value("adopted_sessions", shape, status["adopt"]["sessions"], "sessions");
  const auto after = verify(node);
  rows.value("verified_before", shape, static_cast<double>(before.first), "pages");
  rows.value("verified_after", shape, static_cast<double>(after.first), "pages");
  rows.value("bad_after", shape, static_cast<double>(after.second), "pages");
  for (Server* s : {&a, &b}) {
    const nlohmann::json said = s->result();
    rows.value("decoder_steps", s == &a ? "eager" : "graph", said["steps"], "steps");
    rows.value("decoder_checked", s == &a ? "eager" : "graph", said["checked_steps"], "steps");
    rows.value("decoder_wrong", s == &a ? "eager" : "graph", said["wrong"], "steps");
    rows.value("decoder_median_us", s == &a ? "eager" : "graph", said["median_us"], "us");
    rows.value("decoder_longest_gap_us", s == &a ? "eager" : "graph", said["longest_gap_us"], "us");
  }
  if (after.second != 0 || after.first < before.first) throw std::runtime_error("pages were lost");
}

}  // namespace kvq::bench
