// The right result of a decode step, from the values that were appended: double precision, no page, no format.
#pragma once

#include <vector>

#include "tests/bench/gpu_node/llama.h"

namespace kvq::bench {

// Results of fp16 operands. No format adds to it: values.h is exact in all of them.
inline constexpr double kTolerance = 2e-3;

// One query token's rows [kQueryHeads][kHeadDim] of one layer over `tokens` tokens of stream `seed`. `queries`: fp16,
// as many.
std::vector<double> reference(std::uint32_t seed, std::uint32_t layer, std::uint64_t tokens,
                              const std::uint16_t* queries);

// All layers' rows, [kLayers][kQueryHeads][kHeadDim].
std::vector<float> reference_of_layers(std::uint32_t seed, std::uint64_t tokens, const std::uint16_t* queries);

// Largest relative error of a row: |got - wanted| / |wanted|, Euclidean. NaN counts as infinite.
double row_error(const float* got, const std::vector<double>& wanted);

}  // namespace kvq::bench
