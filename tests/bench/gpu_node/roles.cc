// The servers of the topics about death.
#include "tests/bench/gpu_node/roles.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iostream>

#include "tests/bench/gpu_node/reference.h"

namespace kvq::bench {
namespace {

constexpr std::uint32_t kCheckedLayers[] = {0, 13, 31};

}  // namespace

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
