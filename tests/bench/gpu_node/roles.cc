// Invariant: a decoder's result is right or counted as wrong; nothing is looked at only now and then.
#include "tests/bench/gpu_node/roles.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <deque>
#include <iostream>

#include "tests/bench/gpu_node/reference.h"

namespace kvq::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint32_t kCheckedLayers[] = {0, 13, 31};
constexpr double kTolerance = 2e-3;  // of fp16 operands; no format adds to it, since values.h is exact in all of them

double us_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::micro>(b - a).count();
}

// The layers of a decode step as one graph, replayed.
class Graph {
 public:
  explicit Graph(Llama& llama) {
    std::uint64_t step = 0;
    check(kvq_step_begin(llama.model(), &step));
    llama.launch_layers();  // the workspace is made at the first use
    cudaGraph_t graph = nullptr;
    must(cudaStreamBeginCapture(llama.stream(), cudaStreamCaptureModeThreadLocal), "capture");
    llama.launch_layers();
    must(cudaStreamEndCapture(llama.stream(), &graph), "capture");
    must(cudaGraphInstantiate(&exec_, graph, 0), "graph");
    cudaGraphDestroy(graph);
    check(kvq_step_end(llama.model(), step, llama.stream()));
  }
  ~Graph() { cudaGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  void run(Llama& llama) const {
    std::uint64_t step = 0;
    check(kvq_step_begin(llama.model(), &step));
    must(cudaGraphLaunch(exec_, llama.stream()), "graph");
    check(kvq_step_end(llama.model(), step, llama.stream()));
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

struct Tally {
  std::vector<double> us;
  std::uint64_t wrong = 0;
  double worst = 0, longest_us = 0;
};

}  // namespace

int decoder(const Arguments& arguments) {
  const std::uint64_t tokens = arguments.number("tokens", 8192), steps = arguments.number("steps", ~0ull);
  Llama llama(arguments.text("socket", ""), 1);
  Sequence sequence = llama.open(tokens);
  const std::uint64_t cached = sequence.info().committed_tokens;
  if (cached < tokens) llama.grow(sequence, cached, tokens - cached);
  llama.set_batch({&sequence}, {static_cast<std::int32_t>(tokens)});
  std::vector<std::vector<double>> wanted;
  for (const std::uint32_t layer : kCheckedLayers) {
    wanted.push_back(reference(1, layer, tokens, llama.queries().data()));
  }
  const bool graph = arguments.number("graph", 0) != 0;
  const Graph replayed(llama);
  std::cout << "ready" << std::endl;
  Tally tally;
  std::vector<float> got(kQueryHeads * kHeadDim);
  const auto end = Clock::now() + std::chrono::milliseconds(arguments.number("milliseconds", 10'000));
  auto last = Clock::now();
  while (Clock::now() < end && tally.us.size() < steps) {
    const auto began = Clock::now();
    graph ? replayed.run(llama) : llama.decode();
    llama.synchronize();
    const auto now = Clock::now();
    tally.us.push_back(us_between(began, now));
    tally.longest_us = std::max(tally.longest_us, us_between(last, now));
    double worst = 0;
    for (std::size_t i = 0; i < std::size(kCheckedLayers); ++i) {
      must(cudaMemcpy(got.data(), llama.out(kCheckedLayers[i]), got.size() * 4, cudaMemcpyDeviceToHost), "result");
      worst = std::max(worst, row_error(got.data(), wanted[i]));
      must(cudaMemset(llama.out(kCheckedLayers[i]), 0xff, got.size() * 4), "poison");
    }
    tally.wrong += worst < kTolerance ? 0 : 1;
    tally.worst = std::max(tally.worst, worst);
    last = Clock::now();
  }
  const kvq_sequence_info info = sequence.info();
  double sum = 0;
  for (const double us : tally.us) sum += us;
  std::cout << nlohmann::json{{"cached_tokens", cached},
                              {"steps", tally.us.size()},
                              {"wrong", tally.wrong},
                              {"worst_error", tally.worst},
                              {"mean_us", sum / static_cast<double>(tally.us.size())},
                              {"median_us", quantile(tally.us, 0.5)},
                              {"p99_us", quantile(tally.us, 0.99)},
                              {"longest_gap_us", tally.longest_us},
                              {"dense_pages", info.dense_pages},
                              {"quantized_pages", info.quantized_pages}}
                   .dump()
            << std::endl;
  return tally.wrong == 0 ? 0 : 1;
}

int churner(const Arguments& arguments) {
  const std::uint64_t tokens = arguments.number("tokens", 4096), alive = arguments.number("sequences", 8);
  Llama llama(arguments.text("socket", ""), static_cast<std::uint32_t>(arguments.number("seed", 7)));
  std::deque<Sequence> sequences;
  std::uint64_t made = 0, refused = 0;
  std::cout << "ready" << std::endl;
  const auto end = Clock::now() + std::chrono::milliseconds(arguments.number("milliseconds", 10'000));
  while (Clock::now() < end) {
    try {
      sequences.push_back(llama.open(0));
      llama.grow(sequences.back(), 0, tokens, (made + 1) * 1'000'000, 2000);
    } catch (const Failure& failure) {
      if (failure.status() != KVQ_ERR_NO_MEMORY) throw;
      ++refused;
    }
    ++made;
    if (sequences.size() > alive) sequences.pop_front();
  }
  std::cout << nlohmann::json{{"sequences", made}, {"refused", refused}, {"tokens", made * tokens}}.dump() << std::endl;
  return 0;
}

int stuck(const Arguments& arguments) {
  Llama llama(arguments.text("socket", ""), 5);
  std::uint64_t step = 0;
  check(kvq_step_begin(llama.model(), &step));
  spin(60, llama.stream());
  check(kvq_step_end(llama.model(), step, llama.stream()));
  std::cout << "ready" << std::endl;
  llama.synchronize();
  return 0;
}

int restarted(const Arguments& arguments) {
  const std::uint64_t tokens = arguments.number("tokens", 8192);
  Llama llama(arguments.text("socket", ""), 1);
  Sequence sequence = llama.open(tokens);
  const std::uint64_t cached = sequence.info().committed_tokens;
  if (cached < tokens) llama.grow(sequence, cached, tokens - cached);
  llama.set_batch({&sequence}, {static_cast<std::int32_t>(tokens)});
  llama.decode();
  llama.synchronize();
  std::cout << "decoded" << std::endl;
  std::vector<float> got(kQueryHeads * kHeadDim);
  double worst = 0;
  for (const std::uint32_t layer : kCheckedLayers) {
    must(cudaMemcpy(got.data(), llama.out(layer), got.size() * 4, cudaMemcpyDeviceToHost), "result");
    worst = std::max(worst, row_error(got.data(), reference(1, layer, tokens, llama.queries().data())));
  }
  std::cout << nlohmann::json{{"cached_tokens", cached}, {"worst_error", worst}}.dump() << std::endl;
  return worst < kTolerance ? 0 : 1;
}

}  // namespace kvq::bench
