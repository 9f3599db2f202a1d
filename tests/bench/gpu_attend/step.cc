// Invariant: all layers of all sequences are in memory, in pages of all layers, as a server's are; each step appends
// one token to every sequence, into a dense page, and reads every token: one graph of 2 launches a layer.
#include "tests/bench/gpu_attend/step.h"

#include <algorithm>
#include <cmath>

#include "tests/bench/gpu_attend/shapes.h"
#include "tests/bench/gpu_attend/timing.h"

namespace kvq::bench {
namespace {

constexpr std::uint64_t kSourceBytes = std::uint64_t{1} << 30;  // dense pages that cold ones are made of

struct PageBytes {
  double cold, dense;
};

PageBytes page_bytes(const Shape& shape) {
  ModelGeometry geometry;
  geometry.layers = shape.layers;
  for (std::uint32_t l = 0; l < shape.layers; ++l) geometry.layer[l] = {shape.kv_heads, shape.head_dim, Dtype::fp16, 0};
  return {static_cast<double>(make_layout(geometry, shape.cold).page_bytes),
          static_cast<double>(make_layout(geometry, Format::dense).page_bytes)};
}

double sequence_bytes(const PageBytes& page, std::int32_t tokens) {
  return (std::ceil(tokens / static_cast<double>(kPageTokens)) - 1) * page.cold + page.dense;
}

void measure(Rows& rows, const Step& step, double read_tb_s) {
  Shape shape{.layers = kStepLayers, .growing = true};
  const PageBytes page = page_bytes(shape);
  const double each = sequence_bytes(page, step.tokens);
  const auto sequences = step.sequences != 0 ? step.sequences : static_cast<std::uint32_t>(step.kv_bytes / each);
  if (sequences == 0) return rows.document("kvq_int4", step.text(), {{"batch", 0}, {"tokens_s", 0}});
  shape.lengths.assign(sequences, step.tokens);
  const Arena arena(static_cast<std::uint64_t>((each - page.dense) * sequences),
                    kSourceBytes + static_cast<std::uint64_t>(page.dense * sequences));
  const Workload work(arena, shape);
  const double error = std::max(work.check(0), work.check(kStepLayers - 1));
  const double us = median_us(1, [&](int, cudaStream_t stream) {
    for (std::uint32_t layer = 0; layer < kStepLayers; ++layer) {
      work.enqueue_append(layer, stream);
      work.enqueue(0, stream, layer);
    }
  });
  rows.document("kvq_int4", step.text(),
                {{"median_us", us},
                 {"bytes", work.page_bytes()},
                 {"floor_us", work.page_bytes() / read_tb_s * 1e-6},
                 {"of_ceiling", work.page_bytes() / us * 1e-6 / read_tb_s},
                 {"batch", sequences},
                 {"layers_in_memory", kStepLayers},
                 {"tokens_s", sequences / us * 1e6},
                 {"relative_error", error}});
}

}  // namespace

void measure_steps(Rows& rows, double read_tb_s, double kv_bytes) {
  for (const Step& step : steps(kv_bytes)) measure(rows, step, read_tb_s);
}

}  // namespace kvq::bench
