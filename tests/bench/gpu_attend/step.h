// A decode step's attention and append over all layers of a model of Llama-3-8B's shape: kvq's side of what happens
// beside the model's matrix products.
#pragma once

#include "tests/bench/rows.h"

namespace kvq::bench {

// Rows of the topic step. `kv_bytes`: what the shapes that fill the memory may fill.
void measure_steps(Rows& rows, double read_tb_s, double kv_bytes);

}  // namespace kvq::bench
