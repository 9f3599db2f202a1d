// A real kvqd under kvq-hold, killed again and again: how long until the next one serves, what a decode loop and a call
// notice of it, and how long until a killed client's memory is free.
//
// Invariant: every time is taken from outside, by a clock in this process; every kill is SIGKILL, and the run fails
// unless each was followed by a life that took over. The loop's iteration is tiny (two layers of one head), so that
// what is left of it is kvq's own part.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <thread>

#include "client/abi.h"
#include "kvq/kvq.hpp"
#include "tests/bench/samples.h"
#include "tests/support/held_daemon.h"
#include "tests/support/role_process.h"

namespace kvq::test {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint32_t kHeadDim = 64;
constexpr int kRestarts = 15, kKills = 25;

std::string settings(std::uint64_t arena_mib, std::uint64_t slab_mib, std::uint64_t max_pages) {
  return "arena_bytes = \"" + std::to_string(arena_mib) + "MiB\"\nslab_bytes = \"" + std::to_string(slab_mib) +
         "MiB\"\nmax_pages = " + std::to_string(max_pages) +
         "\nquantize_at = 0.97\nevict_at = 0.98\nrefuse_at = 0.99\nrelief = 0.01\n";
}

// `layers` of `heads` heads: a dense page takes layers * heads * 16 KiB.
struct Served {
  Client client;
  std::vector<kvq_layer> layers;
  std::unique_ptr<Model> model;

  Served(const std::string& socket, std::uint32_t layer_count, std::uint16_t heads, std::uint32_t credits)
      : client(socket, "bench"), layers(layer_count, kvq_layer{heads, kHeadDim, KVQ_FP16, 0, heads}) {
    kvq_model_desc desc{};
    desc.size = sizeof(desc);
    desc.layers = layers.data();
    desc.layer_count = layer_count;
    desc.page_tokens = KVQ_PAGE_TOKENS;
    desc.credits = credits;
    model = std::make_unique<Model>(client, desc);
  }
};

// --- from the start of the next kvqd until it serves

// Waits until the holder's log has `word` behind `from`; returns when, and moves `from` behind it.
Clock::time_point await_word(int log, std::size_t& from, const char* word) {
  const auto until = Clock::now() + std::chrono::minutes(1);
  std::string text;
  for (;;) {
    char part[65536];
    const ssize_t n = ::pread(log, part, sizeof part, static_cast<off_t>(from + text.size()));
    const auto now = Clock::now();
    if (n > 0) text.append(part, static_cast<std::size_t>(n));
    if (const auto at = text.find(word); at != std::string::npos) {
      from += at + std::strlen(word);
      return now;
    }
    if (now > until) throw std::runtime_error(std::string("no ") + word + " in the log");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

struct Shape {
  std::uint64_t arena_mib, slab_mib;
  std::uint32_t layers;
  std::uint16_t heads;
  std::uint32_t pages, sequence_pages;
};

void fill(Served& served, const Shape& shape, std::vector<Sequence>& held) {
  std::vector<std::uint32_t> tokens(std::size_t{shape.sequence_pages} * KVQ_PAGE_TOKENS);
  std::iota(tokens.begin(), tokens.end(), 0);
  for (std::uint32_t pages = 0; pages + shape.sequence_pages <= shape.pages; pages += shape.sequence_pages) {
    tokens[0] = pages + 1'000'000;  // a prefix of its own
    held.push_back(served.model->open({}));
    held.back().reserve(tokens.size(), 60'000);
    held.back().commit(tokens);
    check(served.model->get()->model->session().ping(60'000));  // the daemon has taken the commands
  }
}

void adopt(benchmark::State& state, const Shape& shape) {
  for (auto _ : state) {
    HeldDaemon daemon(settings(shape.arena_mib, shape.slab_mib, shape.pages + 8192));
    std::vector<Sequence> held;
    Served served(daemon.socket(), shape.layers, shape.heads, 1024);
    fill(served, shape, held);
    const int log = ::open((daemon.directory() + "/log").c_str(), O_RDONLY | O_CLOEXEC);
    std::size_t from = daemon.log().size();
    Samples serving, killed_to_serving;
    for (int i = 0; i < kRestarts; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      check(served.model->get()->model->session().ping(60'000));
      const auto killed = Clock::now();
      daemon.kill();
      const auto started = await_word(log, from, "kvq-hold: started");
      const auto ready = await_word(log, from, "kvq-hold: ready");
      serving.add(std::chrono::duration<double, std::micro>(ready - started).count());
      killed_to_serving.add(std::chrono::duration<double, std::micro>(ready - killed).count());
    }
    ::close(log);
    if (daemon.log().find("adopt_refused") != std::string::npos) return state.SkipWithError("it did not take over");
    serving.report(state);
    state.counters["from_kill_us"] = killed_to_serving.at(0.5);
  }
  state.counters["pages"] = shape.pages;
  state.counters["slabs"] = static_cast<double>(shape.arena_mib / shape.slab_mib);
  state.counters["sequences"] = shape.pages / shape.sequence_pages;
  state.counters["arena_mib"] = static_cast<double>(shape.arena_mib);
}
#define KVQ_ADOPT(name, ...)                         \
  BENCHMARK_CAPTURE(adopt, name, Shape{__VA_ARGS__}) \
      ->Iterations(1)                                \
      ->Repetitions(1)                               \
      ->UseManualTime()                              \
      ->Unit(benchmark::kMillisecond)
KVQ_ADOPT(64MiB_2MiB_pages, 64, 2, 32, 4, 28, 7);
KVQ_ADOPT(1GiB_2MiB_pages, 1024, 16, 32, 4, 480, 16);
KVQ_ADOPT(8GiB_2MiB_pages, 8192, 128, 32, 4, 3900, 60);
KVQ_ADOPT(64MiB_16KiB_pages, 64, 2, 1, 1, 3800, 100);
KVQ_ADOPT(1GiB_16KiB_pages, 1024, 16, 1, 1, 62'000, 1000);
KVQ_ADOPT(1GiB_16KiB_pages_of_1000_slabs, 1024, 1, 1, 1, 62'000, 1000);
KVQ_ADOPT(1GiB_16KiB_pages_of_6200_sequences, 1024, 16, 1, 1, 62'000, 10);
KVQ_ADOPT(4GiB_16KiB_pages, 4096, 64, 1, 1, 250'000, 1000);

// --- what a decode loop notices

// One token: room, K and V of two layers, attention over what is there, commit.
class Loop {
 public:
  explicit Loop(Model& model) : model_(model), kv_(kHeadDim, 0x3c00), q_(kHeadDim, 1.0F), out_(kHeadDim) { restart(); }

  void token() {
    if (length_ == kLongest) restart();
    sequence_.reserve(length_ + 1 - committed_, 60'000);
    Step step(model_);
    const auto slots = sequence_.slot_mapping(length_, 1);
    const auto table = sequence_.block_table();
    const std::int32_t starts[2] = {0, 1}, length = static_cast<std::int32_t>(length_ + 1);
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      kvq_append_args append{};
      append.size = sizeof(append);
      append.layer = layer;
      append.tokens = 1;
      append.k = append.v = kv_.data();
      append.k_token_stride = append.k_head_stride = append.v_token_stride = append.v_head_stride = kHeadDim;
      append.slots = slots.data();
      model_.append(append);
      kvq_attend_args attend{};
      attend.size = sizeof(attend);
      attend.layer = layer;
      attend.batch = 1;
      attend.q = q_.data();
      attend.out = out_.data();
      attend.q_token_stride = attend.q_head_stride = attend.out_token_stride = attend.out_head_stride = kHeadDim;
      attend.q_dtype = attend.out_dtype = KVQ_FP32;
      attend.query_starts = starts;
      attend.seq_lengths = &length;
      attend.block_table = table.data();
      attend.block_table_stride = static_cast<std::int64_t>(table.size());
      attend.query_heads = 1;
      attend.window = -1;
      attend.threads = 1;
      model_.attend(attend);
    }
    step.end();
    sequence_.commit({static_cast<std::uint32_t>(length_)});
    committed_ = ++length_;
  }

 private:
  static constexpr std::uint64_t kLongest = 1024;
  void restart() {
    sequence_ = model_.open({});
    length_ = committed_ = 0;
  }

  Model& model_;
  Sequence sequence_;
  std::uint64_t length_ = 0, committed_ = 0;
  std::vector<std::uint16_t> kv_;
  std::vector<float> q_, out_;
};

// `body` again and again for `kills` times 400 ms, with kvqd killed at the start of each, or never. `pace_us` between.
template <typename Body>
void over_kills(benchmark::State& state, bool kills, int pace_us, Body body) {
  for (auto _ : state) {
    HeldDaemon daemon(settings(256, 4, 16'384));
    Served served(daemon.socket(), 2, 1, 8);
    auto run = body(*served.model);
    for (int i = 0; i < 1000; ++i) run();
    Samples all, worst;
    for (int life = 0; life < kKills; ++life) {
      if (kills) daemon.kill();
      double longest = 0;
      for (const auto began = Clock::now(); us_since(began) < 400'000;) {
        const auto at = Clock::now();
        run();
        const double us = us_since(at);
        all.add(us);
        longest = std::max(longest, us);
        if (pace_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pace_us));
      }
      worst.add(longest);
      if (kills) daemon.await_lives(static_cast<std::uint32_t>(life) + 2);
    }
    if (kills && daemon.lives() != kKills + 1) return state.SkipWithError("not every kill was a restart");
    all.report(state);
    state.counters["worst_median_us"] = worst.at(0.5);
    if (daemon.log().find("adopt_refused") != std::string::npos) return state.SkipWithError("it did not take over");
  }
}

void decode(benchmark::State& state, bool kills, int pace_us) {
  over_kills(state, kills, pace_us,
             [](Model& model) { return [loop = std::make_shared<Loop>(model)] { loop->token(); }; });
}
void call(benchmark::State& state, bool kills, int pace_us) {
  over_kills(state, kills, pace_us,
             [](Model& model) { return [&session = model.get()->model->session()] { check(session.ping(60'000)); }; });
}
#define KVQ_OVER_KILLS(what, name, kills, pace_us) \
  BENCHMARK_CAPTURE(what, name, kills, pace_us)    \
      ->Iterations(1)                              \
      ->Repetitions(1)                             \
      ->UseManualTime()                            \
      ->Unit(benchmark::kMicrosecond)
KVQ_OVER_KILLS(decode, alive, false, 0);
KVQ_OVER_KILLS(decode, over_kills, true, 0);
KVQ_OVER_KILLS(decode, paced_alive, false, 5000);
KVQ_OVER_KILLS(decode, paced_over_kills, true, 5000);
KVQ_OVER_KILLS(call, alive, false, 0);
KVQ_OVER_KILLS(call, over_kills, true, 0);

// --- how long until a killed client's memory is free

constexpr std::uint32_t kVictimPages = 280, kWantedPages = 256;  // of 2 MiB

KVQ_ROLE(hold_pages) {
  Served served(arguments.at(0), 32, 4, 1);
  Sequence sequence = served.model->open({});
  sequence.reserve(std::uint64_t{kVictimPages} * KVQ_PAGE_TOKENS, 60'000);
  say("held");
  hear();
  return 0;
}

// From SIGKILL until another session has been granted so many pages that most of them were the victim's.
void reclaim(benchmark::State& state) {
  for (auto _ : state) {
    HeldDaemon daemon(settings(608, 8, 16'384));
    Served served(daemon.socket(), 32, 4, 1);
    Samples samples;
    for (int i = 0; i < kRestarts; ++i) {
      RoleProcess victim("hold_pages", {daemon.socket()});
      victim.hear();
      if (kvq_credits_request(served.model->get(), kWantedPages, 0) == KVQ_OK) {
        return state.SkipWithError("the victim leaves room");
      }
      const auto killed = Clock::now();
      ::kill(victim.pid(), SIGKILL);
      check(kvq_credits_request(served.model->get(), kWantedPages, 60'000));
      samples.add(us_since(killed));
      victim.wait();
      check(kvq_credits_return(served.model->get(), kWantedPages));
      check(served.model->get()->model->session().ping(60'000));
    }
    samples.report(state);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(2 * kMiB * kWantedPages));
}
BENCHMARK(reclaim)->Iterations(1)->Repetitions(1)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kvq::test

int main(int argc, char** argv) {
  if (argc > 1 && std::strncmp(argv[1], "--role=", 7) == 0) return kvq::test::main_with_roles(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
