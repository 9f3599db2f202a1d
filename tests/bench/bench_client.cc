// What a server pays on its CPU for kvq, with a real daemon beside it: magazine, seal, release, steps, round trip,
// cached open.
//
// Invariant: the model is tiny (one layer, one head of 64), so that page bytes cost nothing and only the bookkeeping is
// timed. Medians are what the targets are about: run with --benchmark_repetitions=9
// --benchmark_report_aggregates_only=true
// --benchmark_out=FILE --benchmark_out_format=json.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>

#include "client/abi.h"
#include "kvq/kvq.hpp"
#include "tests/support/daemon_process.h"

namespace kvq::test {
namespace {

constexpr std::uint32_t kLongTokens = 128 * 1024;
constexpr std::uint32_t kBatch = 1024;  // pages between two waits for the daemon, which are not timed

struct Node {
  DaemonProcess daemon{
      "arena_bytes = \"256MiB\"\nslab_bytes = \"4MiB\"\nmax_pages = 16384\nquantize_at = 0.97\nevict_at = 0.98\n"
      "refuse_at = 0.99\nrelief = 0.01\nlog_level = \"off\"\n"};
  Client client{daemon.socket(), "bench"};
  kvq_layer layer{1, 64, KVQ_FP16, 0, 1};
  std::unique_ptr<Model> model;

  Node() {
    kvq_model_desc desc{};
    desc.size = sizeof(desc);
    desc.layers = &layer;
    desc.layer_count = 1;
    desc.page_tokens = KVQ_PAGE_TOKENS;
    desc.credits = 2 * kBatch;
    model = std::make_unique<Model>(client, desc);
  }
};

Node& node() {
  static Node one;
  return one;
}

std::vector<std::uint32_t> tokens_from(std::uint32_t first, std::size_t count) {
  std::vector<std::uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// The daemon has taken every command and refilled the magazine.
void settle() {
  check(kvq_credits_request(node().model->get(), 2 * kBatch, 20'000));
  check(node().model->get()->model->session().ping(60'000));
}

// One page per call from the magazine, `kBatch` between two refills.
void reserve_page(benchmark::State& state) {
  Model& model = *node().model;
  std::uint64_t left = 0;
  Sequence sequence;
  std::uint64_t room = 0;
  for (auto _ : state) {
    if (left == 0) {
      state.PauseTiming();
      sequence = model.open({});
      room = 0;
      settle();
      left = kBatch;
      state.ResumeTiming();
    }
    room += KVQ_PAGE_TOKENS;
    check(kvq_reserve(sequence.get(), room, 0));
    --left;
  }
}
BENCHMARK(reserve_page)->Iterations(16 * kBatch);

// Commit of 64 tokens, which hashes and seals one page.
void commit_page(benchmark::State& state) {
  Model& model = *node().model;
  const auto tokens = tokens_from(1'000'000, KVQ_PAGE_TOKENS);
  std::uint64_t left = 0;
  Sequence sequence;
  for (auto _ : state) {
    if (left == 0) {
      state.PauseTiming();
      sequence = model.open({});
      settle();
      check(kvq_reserve(sequence.get(), kBatch * KVQ_PAGE_TOKENS, 20'000));
      left = kBatch;
      state.ResumeTiming();
    }
    check(kvq_commit(sequence.get(), tokens.data(), tokens.size(), 0, 0));
    --left;
  }
}
BENCHMARK(commit_page)->Iterations(16 * kBatch);

// The same without hashing, as for a private sequence: seal and commit commands alone.
void seal_page(benchmark::State& state) {
  Model& model = *node().model;
  const auto tokens = tokens_from(1'000'000, KVQ_PAGE_TOKENS);
  kvq_open_options options{};
  options.size = sizeof(options);
  options.private_pages = 1;
  std::uint64_t left = 0;
  Sequence sequence;
  for (auto _ : state) {
    if (left == 0) {
      state.PauseTiming();
      sequence = model.open({}, nullptr, &options);
      settle();
      check(kvq_reserve(sequence.get(), kBatch * KVQ_PAGE_TOKENS, 20'000));
      left = kBatch;
      state.ResumeTiming();
    }
    check(kvq_commit(sequence.get(), tokens.data(), tokens.size(), 0, 0));
    --left;
  }
}
BENCHMARK(seal_page)->Iterations(16 * kBatch);

// Open on a miss and release: two commands, one handle.
void open_and_release(benchmark::State& state) {
  Model& model = *node().model;
  std::uint64_t left = 0;
  for (auto _ : state) {
    if (left == 0) {
      state.PauseTiming();
      settle();
      left = kBatch;
      state.ResumeTiming();
    }
    kvq_sequence* sequence = nullptr;
    check(kvq_sequence_open(model.get(), nullptr, 0, nullptr, nullptr, &sequence));
    check(kvq_sequence_release(sequence));
    --left;
  }
}
BENCHMARK(open_and_release)->Iterations(16 * kBatch);

// Release of a sequence that holds one page.
void release_page(benchmark::State& state) {
  Model& model = *node().model;
  std::vector<kvq_sequence*> open;
  for (auto _ : state) {
    if (open.empty()) {
      state.PauseTiming();
      settle();
      open.resize(kBatch);
      for (kvq_sequence*& s : open) {
        check(kvq_sequence_open(model.get(), nullptr, 0, nullptr, nullptr, &s));
        check(kvq_reserve(s, 1, 20'000));
      }
      settle();
      state.ResumeTiming();
    }
    check(kvq_sequence_release(open.back()));
    open.pop_back();
  }
  for (kvq_sequence* s : open) check(kvq_sequence_release(s));
}
BENCHMARK(release_page)->Iterations(8 * kBatch);

void step_begin_end(benchmark::State& state) {
  kvq_model* model = node().model->get();
  for (auto _ : state) {
    std::uint64_t step = 0;
    check(kvq_step_begin(model, &step));
    check(kvq_step_end(model, step, nullptr));
  }
}
BENCHMARK(step_begin_end);

void rpc_round_trip(benchmark::State& state) {
  auto& session = node().model->get()->model->session();
  for (auto _ : state) check(session.ping(60'000));
}
BENCHMARK(rpc_round_trip)->UseRealTime();

// A prompt of 128K tokens whose pages are all cached.
class LongPrompt {
 public:
  LongPrompt() : tokens(tokens_from(7, kLongTokens)) {
    Model& model = *node().model;
    Sequence sequence = model.open({});
    for (std::uint32_t at = 0; at < kLongTokens; at += kBatch * KVQ_PAGE_TOKENS) {
      const std::vector<std::uint32_t> part(tokens.begin() + at, tokens.begin() + at + kBatch * KVQ_PAGE_TOKENS);
      sequence.reserve(part.size(), 20'000);
      sequence.commit(part);
    }
    while (model.lookup(tokens).cached_tokens < kLongTokens) settle();
  }
  const std::vector<std::uint32_t> tokens;
};

const LongPrompt& long_prompt() {
  static const LongPrompt one;
  return one;
}

void open_cached_128k(benchmark::State& state) {
  Model& model = *node().model;
  const auto& tokens = long_prompt().tokens;
  for (auto _ : state) {
    std::uint64_t cached = 0;
    Sequence sequence = model.open(tokens, &cached);
    if (cached != kLongTokens) state.SkipWithError("not all of the prompt was cached");
    state.PauseTiming();
    sequence = Sequence();
    settle();
    state.ResumeTiming();
  }
}
BENCHMARK(open_cached_128k)->UseRealTime();

void lookup_cached(benchmark::State& state) {
  Model& model = *node().model;
  const std::vector<std::uint32_t> tokens(long_prompt().tokens.begin(), long_prompt().tokens.begin() + state.range(0));
  for (auto _ : state) {
    if (model.lookup(tokens).cached_tokens != tokens.size()) state.SkipWithError("not all of the prompt was cached");
  }
}
BENCHMARK(lookup_cached)->Arg(4096)->Arg(kLongTokens);

}  // namespace
}  // namespace kvq::test

BENCHMARK_MAIN();
