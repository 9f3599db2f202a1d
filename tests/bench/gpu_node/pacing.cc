// What quantization costs one server, and two, whose steps take about 10 ms and 2 ms, while kvqd quantizes 1, 10 and
// 100 GB/s: outside MPS, with the servers in MPS, and with the worker in it, too.
//
// Invariant: a row under load is beside one alone of the same processes, which ran just before it. Steps count only
// while a source, which launches nothing meanwhile, hands pages out; every step is compared, counted or not. What was
// quantized is counted in the int4 pages of kvqd's status, so moves and checks are none of it.
#include <signal.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <thread>

#include "tests/bench/gpu_node/llama.h"
#include "tests/bench/gpu_node/node.h"
#include "tests/bench/gpu_node/roles.h"
#include "tests/support/raw_session.h"

namespace kvq::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kSettle(300), kBacklog(5000);

struct Setting {
  const char* name;
  bool servers_in_mps, worker_in_mps;
};

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

// Always at level quantize once a source is full, and never beyond.
NodeOptions options_of(const Setting& setting, const std::vector<std::string>& mps, const Arguments& arguments) {
  NodeOptions options{.arena_bytes = arguments.text("arena", "80GiB"),
                      .quantize_at = 0.02,
                      .evict_at = 0.97,
                      .refuse_at = 0.99,
                      .relief = 0.01,
                      .residual_window_pages = kSourcePages};
  if (setting.worker_in_mps) options.environment = mps;
  return options;
}

struct Counts {
  std::uint64_t int4_pages = 0, transcodes = 0;
};

Counts counts_of(const Node& node) {
  const nlohmann::json status = nlohmann::json::parse(test::RawSession(node.socket()).status());
  Counts counts{.transcodes = status["transcodes"]["done"]};
  for (const nlohmann::json& tenant : status["tenants"]) {
    counts.int4_pages += tenant["formats"]["int4"]["pages"].get<std::uint64_t>();
  }
  return counts;
}

// The servers whose steps are timed.
class Decoders {
 public:
  Decoders(const Node& node, std::uint64_t step_us, std::uint64_t count, const std::vector<std::string>& environment) {
    // Together they take turns, so each has its part of the step alone. One alone finds how many passes that are.
    start(node, {"--step-us", std::to_string(step_us / count)}, environment);
    const std::uint64_t passes = said()[0]["passes"];
    while (servers_.size() < count) start(node, {"--passes", std::to_string(passes)}, environment);
  }
  void turn_window() {
    for (const auto& s : servers_) s->signal(SIGUSR2);
  }
  std::vector<nlohmann::json> said() {
    std::vector<nlohmann::json> out;
    for (const auto& s : servers_) s->signal(SIGUSR1);
    for (const auto& s : servers_) out.push_back(s->next());
    return out;
  }
  std::vector<nlohmann::json> end() {
    std::vector<nlohmann::json> out;
    for (const auto& s : servers_) s->signal(SIGTERM);
    for (const auto& s : servers_) out.push_back(s->result());
    return out;
  }

 private:
  void start(const Node& node, std::vector<std::string> options, const std::vector<std::string>& environment) {
    options.insert(options.end(), {"--socket", node.socket(), "--credits", "16"});
    servers_.push_back(std::make_unique<Server>("decoder", options, environment));
    servers_.back()->await_ready();
  }
  std::vector<std::unique_ptr<Server>> servers_;
};

struct Load {
  double gb_s = 0, seconds = 0;  // wanted; of all windows
  std::uint64_t pages = 0, windows = 0;
  std::int64_t moves = 0;  // other transcodes that ended in the windows

  double achieved_gb_s() const { return static_cast<double>(pages) * kDensePageBytes / 1e9 / seconds; }
};

// One window, from the first page that is handed out until the last one is quantized.
void open_window(const Node& node, Decoders& decoders, Server& source, Load& load) {
  const Counts before = counts_of(node);
  const auto began = Clock::now();
  decoders.turn_window();
  source.signal(SIGUSR1);
  source.await("spent");
  const std::uint64_t parked = source.next()["pages"];
  const auto late = Clock::now() + kBacklog;
  Counts now = counts_of(node);
  // A page counts as int4 from the start of its transcode on.
  while (now.int4_pages < before.int4_pages + parked || now.transcodes < before.transcodes + parked) {
    if (Clock::now() > late) {
      throw std::runtime_error("5 s after " + std::to_string(parked) + " pages were handed out there are " +
                               std::to_string(now.int4_pages) + " int4 pages, " + std::to_string(before.int4_pages) +
                               " before: " + test::RawSession(node.socket()).status());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    now = counts_of(node);
  }
  decoders.turn_window();
  source.signal(SIGUSR1);
  load.seconds += seconds_since(began);
  load.pages += now.int4_pages - before.int4_pages;
  load.moves += static_cast<std::int64_t>(now.transcodes - before.transcodes) -
                static_cast<std::int64_t>(now.int4_pages - before.int4_pages);
  ++load.windows;
}

Load put_under_load(const Node& node, Decoders& decoders, double gb_s, double seconds,
                    const std::vector<std::string>& environment, const Arguments& arguments) {
  Load load{.gb_s = gb_s};
  Server source("source",
                {"--socket", node.socket(), "--gib", arguments.text("gib", "44"), "--mb-s",
                 std::to_string(std::lround(gb_s * 1000)), "--window-ms", arguments.text("window-ms", "5000")},
                environment);
  while (load.seconds < seconds) {
    source.await_ready();
    std::this_thread::sleep_for(kSettle);  // what it gave up is free, and what it wrote has its sums
    open_window(node, decoders, source, load);
  }
  source.kill();
  return load;
}

void write_rows(Rows& rows, const std::string& shape, const Load& load, const std::vector<nlohmann::json>& alone,
                std::vector<nlohmann::json> said, double least_steps) {
  for (std::size_t i = 0; i < said.size(); ++i) {
    if (said[i]["steps"].get<double>() < least_steps) throw std::runtime_error("too few steps: " + said[i].dump());
    for (const char* what : {"mean", "median", "p99"}) {
      const std::string us = std::string(what) + "_us";
      said[i][std::string(what) + "_ratio"] = said[i][us].get<double>() / alone[i][us].get<double>();
    }
    if (load.windows > 0) {
      said[i].update({{"wanted_gb_s", load.gb_s},
                      {"achieved_gb_s", load.achieved_gb_s()},
                      {"quantized_pages", load.pages},
                      {"moves", load.moves},
                      {"windows", load.windows}});
    }
    rows.document("step_of_" + std::to_string(i + 1), shape, said[i]);
  }
}

void measure(Rows& rows, const Setting& setting, const std::vector<std::string>& mps, std::uint64_t clients,
             std::uint64_t step_us, const Arguments& arguments) {
  const auto seconds = static_cast<double>(arguments.number("seconds", 5));  // that are counted, of each row
  const double least_steps = seconds * 1e6 / static_cast<double>(step_us) / 4;
  Node node(options_of(setting, mps, arguments));
  if ((node.daemon().log().find(" mps=yes") != std::string::npos) != setting.worker_in_mps) {
    throw std::runtime_error(std::string("the worker is not where it should be: ") + setting.name);
  }
  const std::vector<std::string> environment = setting.servers_in_mps ? mps : std::vector<std::string>{};
  Decoders decoders(node, step_us, clients, environment);
  node.quantize_all();
  const std::string shape = std::string(setting.name) + ", " + std::to_string(clients) +
                            (clients == 1 ? " client, " : " clients, ") + std::to_string(step_us / 1000) + " ms";
  decoders.said();
  decoders.turn_window();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  decoders.turn_window();
  const std::vector<nlohmann::json> alone = decoders.said();
  write_rows(rows, shape + ", alone", {}, alone, alone, least_steps);
  for (const double gb_s : {1.0, 10.0, 100.0}) {
    const Load load = put_under_load(node, decoders, gb_s, seconds, environment, arguments);
    write_rows(rows, shape + ", " + std::to_string(std::lround(gb_s)) + " GB/s", load, alone, decoders.said(),
               least_steps);
  }
  for (const nlohmann::json& said : decoders.end()) {
    rows.document("checked", shape,
                  {{"checked_steps", said["checked_steps"]},
                   {"wrong", said["wrong"]},
                   {"worst_error", said["worst_error"]},
                   {"quantized_pages_read", said["quantized_pages"]}});
  }
}

}  // namespace

void pacing(Rows& rows, const Arguments& arguments) {
  const Mps mps;
  constexpr Setting kSettings[] = {
      {"no MPS", false, false}, {"servers in MPS", true, false}, {"servers and worker in MPS", true, true}};
  const std::string only = arguments.text("setting");  // the beginning of its name; empty: all
  for (const Setting& setting : kSettings) {
    if (std::string(setting.name).rfind(only, 0) != 0) continue;
    if (setting.servers_in_mps && !mps.works()) {
      std::cerr << "no MPS here: left out\n";
      break;
    }
    for (const std::uint64_t clients : {1, 2}) {
      for (const std::uint64_t step_us : {10'000, 2'000}) {
        measure(rows, setting, mps.environment(), clients, step_us, arguments);
      }
    }
  }
}

}  // namespace kvq::bench
