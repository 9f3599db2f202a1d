// Invariant: a decoder's result is right or counted as wrong; nothing is looked at only now and then. What is checked,
// looked at and exchanged between two steps is in no step's time.
#include <cuda_runtime_api.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <numeric>
#include <stdexcept>

#include "tests/bench/gpu_node/page_watch.h"
#include "tests/bench/gpu_node/reference.h"
#include "tests/bench/gpu_node/roles.h"
#include "tests/bench/gpu_node/step_check.h"

namespace kvq::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint32_t kSeed = 1;           // of the document
constexpr std::uint64_t kStepsPerLook = 20;  // for the next edition
constexpr int kCalibrationSteps = 50;
volatile sig_atomic_t stopped = 0, begun = 0;  // SIGTERM, SIGUSR1
volatile sig_atomic_t open_windows = 0;        // SIGUSR2: odd: steps count

double us_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::micro>(b - a).count();
}

// The layers of a decode step as one graph, replayed. It reads the block table where it lies, so it serves every
// edition: they have as many pages.
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
  void run(Llama& llama, std::uint64_t passes = 1) const {
    std::uint64_t step = 0;
    check(kvq_step_begin(llama.model(), &step));
    for (; passes > 0; --passes) must(cudaGraphLaunch(exec_, llama.stream()), "graph");
    check(kvq_step_end(llama.model(), step, llama.stream()));
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// What is decoded over: edition 0 is written by whoever comes first, the others by the churner.
class Document {
 public:
  Document(Llama& llama, std::uint64_t tokens) : llama_(llama), tokens_(tokens), sequence_(llama.open(tokens)) {
    cached_ = sequence_.info().committed_tokens;
    if (cached_ < tokens) llama.grow(sequence_, cached_, tokens - cached_);
    pages_ = sequence_.block_table().size();
    read();
  }
  // The next edition instead, if it is there as a whole. No step may be open.
  void follow() {
    if (llama_.cached(tokens_, edition_ + 1) < tokens_) return;
    Sequence next = llama_.open(tokens_, edition_ + 1);
    if (next.info().committed_tokens < tokens_) return;  // something of it was dropped meanwhile
    if (next.block_table().size() != pages_) throw std::runtime_error("an edition has another number of pages");
    sequence_ = std::move(next);
    ++edition_;
    read();
  }
  void look() { watch_.look(*llama_.model()->model); }
  void forget() { watch_.forget(); }
  std::uint64_t cached() const { return cached_; }

  nlohmann::json json() {
    nlohmann::json out = watch_.json();
    const kvq_sequence_info info = sequence_.info();
    out.update({{"cached_tokens", cached_},
                {"editions", edition_ + 1},
                {"dense_pages", info.dense_pages},
                {"quantized_pages", info.quantized_pages}});
    return out;
  }

 private:
  void read() {
    llama_.set_batch({&sequence_}, {static_cast<std::int32_t>(tokens_)});
    watch_.begin(*llama_.model()->model, sequence_.block_table());
  }

  Llama& llama_;
  std::uint64_t tokens_, cached_ = 0;
  Sequence sequence_;
  std::size_t pages_ = 0;
  std::uint32_t edition_ = 0;
  PageWatch watch_;
};

struct Times {
  std::vector<double> us;
  double longest_us = 0;  // from the end of one step to the end of the next

  nlohmann::json json() const {
    const double sum = std::accumulate(us.begin(), us.end(), 0.0);
    return {{"steps", us.size()},
            {"mean_us", us.empty() ? 0 : sum / static_cast<double>(us.size())},
            {"median_us", quantile(us, 0.5)},
            {"p99_us", quantile(us, 0.99)},
            {"longest_gap_us", longest_us}};
  }
};

// The check itself: a right step, one with one wrong element, and one that wrote nothing. Counts begin after it.
void prove(StepCheck& right, Llama& llama) {
  llama.decode();
  right.enqueue(llama);
  llama.decode();
  llama.synchronize();
  float* element = llama.out(kLayers - 1) + kQueryHeads * kHeadDim - 1;
  float value = 0;
  must(cudaMemcpy(&value, element, sizeof value, cudaMemcpyDeviceToHost), "element");
  value = 2 * value + 1;
  must(cudaMemcpy(element, &value, sizeof value, cudaMemcpyHostToDevice), "element");
  must(cudaDeviceSynchronize(), "element");
  right.enqueue(llama);
  right.enqueue(llama);
  const StepCheck::Counts counts = right.counts(llama);
  if (counts.steps != 3 || counts.wrong != 2) {
    throw std::runtime_error("of a right and two wrong steps the check finds " + std::to_string(counts.wrong) +
                             " wrong");
  }
  right.reset(llama);
}

// How often a step of `step_us` goes over the layers, on a GPU that nobody else uses now.
std::uint64_t passes_of(double step_us, const Graph& graph, Llama& llama) {
  std::vector<double> us;
  for (int i = 0; i < kCalibrationSteps; ++i) {
    const auto began = Clock::now();
    graph.run(llama);
    llama.synchronize();
    us.push_back(us_between(began, Clock::now()));
  }
  return static_cast<std::uint64_t>(std::max(1.0, std::round(step_us / quantile(us, 0.5))));
}

// Steps in windows that the asker opens and closes, for as long as it likes.
void decode_in_windows(Llama& llama, const Graph& graph, std::uint64_t passes, StepCheck& right) {
  Times times;
  while (stopped == 0) {
    if (begun != 0) {
      begun = 0;
      nlohmann::json said = times.json();
      said["passes"] = passes;
      std::cout << said.dump() << std::endl;
      times = {};
    }
    const int window = open_windows;
    const auto began = Clock::now();
    graph.run(llama, passes);
    llama.synchronize();
    const auto now = Clock::now();
    if (window % 2 == 1 && window == open_windows) times.us.push_back(us_between(began, now));
    right.enqueue(llama);
    llama.synchronize();
  }
}

Times decode(Llama& llama, Document& document, const Graph* graph, StepCheck& right, const Arguments& arguments) {
  const std::uint64_t steps = arguments.number("steps", 0);
  const auto end = Clock::now() + std::chrono::milliseconds(arguments.number("milliseconds", 10'000));
  Times times;
  bool measures = false, said = steps == 0;
  const auto enough = [&] {
    if (!said) std::cout << "enough" << std::endl;
    said = true;
  };
  auto last = Clock::now();
  for (std::uint64_t n = 0; stopped == 0 && Clock::now() < end; ++n) {
    if (begun != 0) {
      begun = 0;
      measures = true;
      times = {};
      document.forget();
    }
    if (n % kStepsPerLook == 0) document.follow();
    const auto began = Clock::now();
    graph != nullptr ? graph->run(llama) : llama.decode();
    llama.synchronize();
    const auto now = Clock::now();
    times.us.push_back(us_between(began, now));
    times.longest_us = std::max(times.longest_us, us_between(last, now));
    right.enqueue(llama);
    document.look();
    llama.synchronize();
    last = Clock::now();
    if (measures && times.us.size() == steps) enough();
  }
  enough();
  return times;
}

}  // namespace

int decoder(const Arguments& arguments) {
  const std::uint64_t tokens = arguments.number("tokens", 8192);
  ::signal(SIGTERM, [](int) { stopped = 1; });
  ::signal(SIGUSR1, [](int) { begun = 1; });
  ::signal(SIGUSR2, [](int) { open_windows = open_windows + 1; });
  Llama llama(arguments.text("socket"), kSeed, static_cast<std::uint32_t>(arguments.number("credits", 256)));
  Document document(llama, tokens);
  StepCheck right(reference_of_layers(kSeed, tokens, llama.queries().data()), kTolerance);
  const Graph replayed(llama);
  prove(right, llama);
  std::uint64_t passes = arguments.number("passes", 0);
  const std::uint64_t step_us = arguments.number("step-us", 0);
  if (step_us != 0) passes = passes_of(static_cast<double>(step_us), replayed, llama);
  std::cout << "ready" << std::endl;
  Times times;
  if (passes != 0) {
    decode_in_windows(llama, replayed, passes, right);
  } else {
    times = decode(llama, document, arguments.number("graph", 0) != 0 ? &replayed : nullptr, right, arguments);
  }
  const StepCheck::Counts counts = right.counts(llama);
  nlohmann::json out = times.json();
  out.update(document.json());
  out.update({{"checked_steps", counts.steps}, {"wrong", counts.wrong}, {"worst_error", counts.worst}});
  std::cout << out.dump() << std::endl;
  return counts.wrong == 0 && counts.steps >= times.us.size() ? 0 : 1;
}

}  // namespace kvq::bench
