// Attention on the device beside a plain read of as much memory in the same run: decode over many shapes, head sizes
// and formats, ragged batches, several query tokens, prefill over a quantized history, steps of a whole model.
//
//   kvq_bench_gpu_attend [--topic decode|heads|formats|ragged|verify|prefill|step] [--kv-bytes N] [--commit C] [--date
//   D]
//                        [--out FILE]
//   kvq_bench_gpu_attend --list TOPIC     its shapes as JSON, without a GPU
//
// Without a topic: decode. Every shape is compared with the oracle before it is timed, and the row has its error.
// --kv-bytes: what the steps of topic step may fill (default: an H200 beside 16 GB of weights).
#include <cstdio>

#include "tests/bench/about_gpu.h"
#include "tests/bench/gpu_attend/shapes.h"
#include "tests/bench/gpu_attend/step.h"
#include "tests/bench/gpu_attend/timing.h"
#include "tests/bench/gpu_attend/workload.h"

namespace kvq::bench {
namespace {

constexpr int kMinLaunches = 12;
constexpr double kLongFlops = 5e11;  // a launch with more is timed kLongLaunches at a time
constexpr int kLongLaunches = 3;
constexpr std::uint64_t kKvBytes = 128'000'000'000;

struct Bench {
  Rows& rows;
  Arena arena;
  double read_tb_s = 0;

  double time(const std::string& name, const Shape& shape) {
    const Workload work(arena, shape);
    const double error = work.check();
    const int launches = work.flops() > kLongFlops ? kLongLaunches : std::max(kMinLaunches, work.sets());
    const double us = median_us(launches, [&](int i, cudaStream_t stream) { work.enqueue(i % work.sets(), stream); });
    const double tb_s = work.page_bytes() / us * 1e-6;
    rows.document(name, shape.text(),
                  {{"median_us", us},
                   {"bytes", work.page_bytes()},
                   {"floor_us", work.page_bytes() / read_tb_s * 1e-6},
                   {"of_ceiling", tb_s / read_tb_s},
                   {"tflop_s", work.flops() / us * 1e-6},
                   {"relative_error", error}});
    return us;
  }
};

Shape dense(Shape shape) {
  shape.dense_share = 1;
  return shape;
}

void decode(Bench& bench) {
  for (const Shape& shape : shapes_of("decode")) {
    bench.time("kvq_int4", shape);
    bench.time("kvq_dense", dense(shape));
    Shape mixed = shape;
    mixed.dense_share = 0.05;
    bench.time("kvq_mixed5", mixed);
  }
}

void both(Bench& bench, const std::string& topic) {
  for (const Shape& shape : shapes_of(topic)) {
    bench.time("kvq_int4", shape);
    bench.time("kvq_dense", dense(shape));
  }
}

void formats(Bench& bench) {
  for (const Format format : {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4}) {
    constexpr const char* kNames[] = {"", "", "kvq_int4", "kvq_int4_k4", "kvq_int4_k8", "kvq_k8v4"};
    for (Shape shape : shapes_of("formats")) {
      shape.cold = format;
      bench.time(kNames[static_cast<std::size_t>(format)], shape);
    }
  }
}

// Several query tokens: beside dense pages of the same kernel.
void queries(Bench& bench, const std::string& topic) {
  for (const Shape& shape : shapes_of(topic)) {
    const double us = bench.time("kvq_int4", shape);
    bench.rows.value("int4_speed_of_dense", shape.text(), bench.time("kvq_dense", dense(shape)) / us, "ratio");
  }
}

void measure(Rows& rows, const std::string& topic, double read_tb_s, double kv_bytes) {
  if (topic == "step") return measure_steps(rows, read_tb_s, kv_bytes);
  Bench bench{rows, Arena(), read_tb_s};
  if (topic == "decode") return decode(bench);
  if (topic == "formats") return formats(bench);
  if (topic == "verify" || topic == "prefill") return queries(bench, topic);
  both(bench, topic);
}

int run(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const auto kv_bytes = static_cast<double>(arguments.number("kv-bytes", kKvBytes));
  if (const std::string wanted = arguments.text("list"); !wanted.empty()) {
    std::printf("%s\n", list_of(wanted, kv_bytes).dump().c_str());
    return 0;
  }
  const std::string topic = arguments.text("topic", "decode");
  list_of(topic, kv_bytes);  // refuses what is no topic
  Rows rows(about_gpu(topic == "decode" ? topic : "attend_" + topic, "kvq_bench_gpu_attend", arguments),
            arguments.text("out"));
  const double read_tb_s = read_ceiling_tb_s();
  rows.ceiling("read_tb_s", read_tb_s);
  rows.ceiling("copy_tb_s", copy_ceiling_tb_s());
  measure(rows, topic, read_tb_s, kv_bytes);
  rows.write();
  return 0;
}

}  // namespace
}  // namespace kvq::bench

int main(int argc, char** argv) {
  try {
    return kvq::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvq_bench_gpu_attend: %s\n", error.what());
    return 1;
  }
}
