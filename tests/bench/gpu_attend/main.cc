// Attention on the device beside a plain read of as much memory in the same run: decode over many shapes, head sizes
// and formats, ragged batches, several query tokens, prefill over a quantized history.
//
//   kvq_bench_gpu_attend [--topic decode|heads|formats|ragged|verify|prefill] [--commit C] [--date D] [--out FILE]
//
// Without a topic: decode. Every shape is compared with the oracle before it is timed, and the row has its error.
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>

#include "tests/bench/about_gpu.h"
#include "tests/bench/gpu_attend/timing.h"
#include "tests/bench/gpu_attend/workload.h"

namespace kvq::bench {
namespace {

constexpr int kMinLaunches = 12;
constexpr double kLongFlops = 5e11;  // a launch with more is timed kLongLaunches at a time
constexpr int kLongLaunches = 3;

std::vector<std::int32_t> alike(std::size_t sequences, std::int32_t length) {
  return std::vector<std::int32_t>(sequences, length);
}

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
  constexpr std::int32_t kShapes[][2] = {{1, 4096},  {1, 16384}, {1, 65536}, {1, 131072}, {1, 1048576},
                                         {8, 32768}, {32, 8192}, {64, 4096}, {128, 1024}};
  for (const auto& [sequences, length] : kShapes) {
    const Shape shape{.lengths = alike(static_cast<std::size_t>(sequences), length)};
    bench.time("kvq_int4", shape);
    bench.time("kvq_dense", dense(shape));
    Shape mixed = shape;
    mixed.dense_share = 0.05;
    bench.time("kvq_mixed5", mixed);
  }
}

void heads(Bench& bench) {
  for (const std::uint16_t head_dim : {64, 128, 256}) {
    for (const std::uint32_t group : {1u, 2u, 4u, 7u, 8u, 16u}) {
      const Shape shape{.lengths = alike(8, 32768), .head_dim = head_dim, .group = group};
      bench.time("kvq_int4", shape);
      bench.time("kvq_dense", dense(shape));
    }
  }
}

void formats(Bench& bench) {
  for (const Format format : {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4}) {
    constexpr const char* kNames[] = {"", "", "kvq_int4", "kvq_int4_k4", "kvq_int4_k8", "kvq_k8v4"};
    for (const auto& lengths : {alike(1, 131072), alike(8, 32768), alike(64, 4096)}) {
      bench.time(kNames[static_cast<std::size_t>(format)], {.lengths = lengths, .cold = format});
    }
  }
}

// From 100 to 100,000 tokens, as many short ones as long ones by the logarithm.
void ragged(Bench& bench) {
  for (const std::size_t sequences : {std::size_t{16}, std::size_t{64}}) {
    std::mt19937_64 random(7);
    std::uniform_real_distribution<> decades(2, 5);
    Shape shape;
    for (std::size_t s = 0; s < sequences; ++s) {
      shape.lengths.push_back(static_cast<std::int32_t>(std::pow(10, decades(random))));
    }
    bench.time("kvq_int4", shape);
    bench.time("kvq_dense", dense(shape));
  }
}

void verify(Bench& bench) {
  for (const std::uint32_t queries : {2u, 4u, 8u, 16u}) {
    const Shape shape{.lengths = alike(8, 32768), .queries = queries};
    const double us = bench.time("kvq_int4", shape);
    bench.rows.value("int4_speed_of_dense", shape.text(), bench.time("kvq_dense", dense(shape)) / us, "ratio");
  }
}

void prefill(Bench& bench) {
  for (const std::int32_t history : {8192, 32768, 131072}) {
    for (const std::uint32_t queries : {512u, 2048u, 8192u}) {
      const Shape shape{.lengths = {history + static_cast<std::int32_t>(queries)}, .queries = queries};
      const double us = bench.time("kvq_int4", shape);
      bench.rows.value("int4_speed_of_dense", shape.text(), bench.time("kvq_dense", dense(shape)) / us, "ratio");
    }
  }
}

int run(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const std::map<std::string, std::function<void(Bench&)>> topics = {{"decode", decode},   {"heads", heads},
                                                                     {"formats", formats}, {"ragged", ragged},
                                                                     {"verify", verify},   {"prefill", prefill}};
  const std::string topic = arguments.text("topic", "decode");
  const auto found = topics.find(topic);
  if (found == topics.end()) {
    throw std::invalid_argument("--topic is one of decode, heads, formats, ragged, verify, prefill, not " + topic);
  }
  Rows rows(about_gpu(topic == "decode" ? topic : "attend_" + topic, "kvq_bench_gpu_attend", arguments),
            arguments.text("out"));
  const double read_tb_s = read_ceiling_tb_s();
  rows.ceiling("read_tb_s", read_tb_s);
  rows.ceiling("copy_tb_s", copy_ceiling_tb_s());
  Bench bench{rows, Arena(), read_tb_s};
  found->second(bench);
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
