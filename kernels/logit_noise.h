// What quantizing costs, as attention sees it: for operators, who decide by it what stays dense.
//
// Invariant: a pure function of the bytes; any thread may call it.
#pragma once

#include <cstddef>

#include "kvq/page_format.h"

namespace kvq {

// Relative logit noise of one layer of one page, from its dense and its quantized blocks (pointers to the layer's first
// block):
//   sqrt( sum |e - mean e|^2 / sum |k - mean k|^2 ),   e = k' - k,
// sums over KV heads, channels and the 64 tokens, means over the tokens. That is the root mean square of the error of
// q.k against that of q.k itself for queries without a preferred direction; what is equal for all keys moves no
// softmax. 0 for constant keys.
float logit_noise(const LayerSpec& spec, const LayerPlace& dense, const std::byte* before, const LayerPlace& cold,
                  const std::byte* after);

}  // namespace kvq
