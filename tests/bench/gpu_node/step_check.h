// Compares what a decode step gave, all layers of it, with the right values, where both lie: on the GPU.
//
// Invariant: every element of every step that is checked is compared, and then poisoned, so that a step which writes
// nothing is wrong too. The host asks for the counts once, at the end.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/bench/gpu_node/llama.h"

namespace kvq::bench {

class StepCheck {
 public:
  // `wanted`: [kLayers][kQueryHeads][kHeadDim], of one query token. `tolerance`: of a row's relative error, as
  // row_error() has it; NaN and infinity are beyond it.
  StepCheck(const std::vector<float>& wanted, float tolerance);

  // Enqueues the check of the step whose outputs the stream has written: llama's first row of each layer.
  void enqueue(const Llama& llama);

  struct Counts {
    std::uint64_t steps = 0, wrong = 0;
    float worst = 0;  // relative error of a row
  };
  Counts counts(Llama& llama) const;  // synchronizes
  void reset(Llama& llama);           // the same; nothing is counted after it

 private:
  DeviceBytes wanted_, tally_;
  float tolerance_;
};

}  // namespace kvq::bench
