// Slow, obvious, double-precision twins of the kernels, for tests.
//
// Invariant: shares no arithmetic and no index function with the kernels: orders are walked as page_format.h draws
// them, 16-bit floats are decoded from their definition, every fp32 operation of the codec is a double operation
// rounded once.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/host_kernels.h"

namespace kvq::oracle {

double decode_element(std::uint16_t bits, Dtype dtype);
std::uint16_t encode_half(double x);  // nearest, ties to even

// K and V of one block, [64][head_dim] in natural order.
struct Block {
  std::vector<double> k, v;
};
Block read_block(Format format, std::uint32_t head_dim, Dtype dtype, const std::byte* block);

// Codes and parameters of a block by the rules of DESIGN (int4_codec.h states them).
void quantize_block(Format format, std::uint32_t head_dim, Dtype dtype, const std::byte* dense, std::byte* out);

// One (query token, query head): the exact result and what bounds the kernels' error.
struct Row {
  std::vector<double> out;
  double lse = 0;
  double logit_error = 0;  // largest error that a logit of the row may have
  double spread = 0;       // largest root of the summed squares of a logit's terms, |q| (|k| + half the range of codes)
  double max_value = 0;    // largest |V| that the row sees
  bool quantized = false;  // whether the row sees a quantized page
};

// Rows in [query token][query head] order, query tokens from query_starts[0] on. Every page must be readable.
std::vector<Row> attend(const AttentionCall& call);

}  // namespace kvq::oracle
