// Two servers decode over one shared document, alone and while a third one's pages are appended, quantized, compacted
// and dropped without pause, the document's own among them; outside MPS, with the servers in MPS, and with the worker
// in it, too.
//
// Invariant: a row is written only when both decoders have measured --steps steps, each of them checked and right, and,
// under churn, when pages of theirs were quantized and moved while they read them. The three processes run for as long
// as anything is measured.
#include <signal.h>

#include <chrono>
#include <iostream>
#include <thread>

#include "tests/bench/gpu_node/node.h"
#include "tests/bench/gpu_node/roles.h"

namespace kvq::bench {
namespace {

constexpr auto kUntilPressure = std::chrono::seconds(2);

struct Setting {
  const char* name;
  bool servers_in_mps, worker_in_mps;
};

struct Result {
  nlohmann::json eager, graph;
};

// A slab holds 256 dense or about 930 int4 pages, so the document is a small part of one (churner.cc says why), and few
// of them may be full before cached pages are dropped, so that a slab soon empties. No page but the first is kept dense
// for being near the end of its sequence.
NodeOptions options_of(const Setting& setting, const std::vector<std::string>& mps) {
  NodeOptions options{.arena_bytes = "20GiB",
                      .slab_bytes = "2GiB",
                      .quantize_at = 0.15,
                      .evict_at = 0.45,
                      .refuse_at = 0.95,
                      .relief = 0.05,
                      .residual_window_pages = 0};
  if (setting.worker_in_mps) options.environment = mps;
  return options;
}

void require(const nlohmann::json& said, std::uint64_t steps, bool churn) {
  const auto number = [&](const char* name) { return said[name].get<std::uint64_t>(); };
  std::string why;
  if (number("steps") < steps) why = "too few steps within --milliseconds";
  if (churn && number("pages_quantized_while_read") == 0) why = "no page was quantized while it was read";
  if (churn && number("pages_moved_while_read") == 0) why = "no page was moved while it was read";
  if (!why.empty()) throw std::runtime_error(why + ": " + said.dump());
}

Result measure(Rows& rows, const Setting& setting, const std::vector<std::string>& mps, bool churn,
               const Arguments& arguments) {
  const std::uint64_t steps = arguments.number("steps", 10'000);
  Node node(options_of(setting, mps));
  const std::vector<std::string> servers = setting.servers_in_mps ? mps : std::vector<std::string>{};
  const std::vector<std::string> common = {"--socket", node.socket(),    "--credits",
                                           "64",       "--milliseconds", arguments.text("milliseconds", "90000")};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), common.begin(), common.end());
    return more;
  };
  Server a("decoder", with({"--credits", "16", "--steps", std::to_string(steps)}), servers);
  a.await_ready();
  Server b("decoder", with({"--credits", "16", "--steps", std::to_string(steps), "--graph", "1"}), servers);
  b.await_ready();
  std::unique_ptr<Server> c;
  if (churn) {
    c = std::make_unique<Server>(
        "churner", with({"--credits", "64", "--sequences", "3", "--edition-ms", arguments.text("edition-ms", "2000")}),
        servers);
    c->await_ready();
    std::this_thread::sleep_for(kUntilPressure);
  } else {
    node.quantize_all();  // the document in the format in which it is read under churn, too
  }
  const std::uint64_t transcodes_before = node.ask("status")["transcodes"]["done"];
  for (Server* s : {&a, &b}) s->signal(SIGUSR1);
  for (Server* s : {&a, &b}) s->await("enough");
  const nlohmann::json status = node.ask("status");
  for (Server* s : {&a, &b}) s->signal(SIGTERM);
  const Result result = {a.result(), b.result()};
  const std::string shape = std::string(setting.name) + (churn ? ", churn" : ", alone");
  rows.document("decode_eager", shape, result.eager);
  rows.document("decode_graph", shape, result.graph);
  for (const nlohmann::json* said : {&result.eager, &result.graph}) require(*said, steps, churn);
  if (!churn) return result;
  c->signal(SIGTERM);
  nlohmann::json said = c->result();
  said.update({{"transcodes", status["transcodes"]["done"].get<std::uint64_t>() - transcodes_before},
               {"transcodes_failed", status["transcodes"]["failed"]},
               {"dropped_pages", status["dropped_pages"]}});
  rows.document("churn", shape, said);
  return result;
}

void compare(Rows& rows, const char* name, const Setting& setting, const nlohmann::json& alone,
             const nlohmann::json& churn) {
  nlohmann::json row;
  for (const char* what : {"mean", "median", "p99"}) {
    const std::string us = std::string(what) + "_us";
    row[what] = churn[us].get<double>() / alone[us].get<double>();
  }
  rows.document(name, setting.name, std::move(row));
}

}  // namespace

void interference(Rows& rows, const Arguments& arguments) {
  const Mps mps;
  constexpr Setting kSettings[] = {
      {"no MPS", false, false}, {"servers in MPS", true, false}, {"servers and worker in MPS", true, true}};
  for (const Setting& setting : kSettings) {
    if (setting.servers_in_mps && !mps.works()) {
      std::cerr << "no MPS here: left out\n";
      break;
    }
    const Result alone = measure(rows, setting, mps.environment(), false, arguments);
    const Result churn = measure(rows, setting, mps.environment(), true, arguments);
    compare(rows, "slowdown_eager", setting, alone.eager, churn.eager);
    compare(rows, "slowdown_graph", setting, alone.graph, churn.graph);
  }
}

}  // namespace kvq::bench
