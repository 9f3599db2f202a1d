// Transcodes and appends on the GPU beside plain copies, and directory entries written in stream order.
//
// Invariant: bytes are those read plus those written, checksums are computed in every row; the ceiling is a copy of 4
// GiB in this same run. Sources and destinations are many times the second-level cache and taken in turn.
//
// A row's median is that of one batch among many that follow one another in a graph and may overlap, as a worker's may;
// `alone_us` is the same where each waits for the end of the one before. Beside each stands a plain copy kernel that
// moves as many bytes in the same way. `call_to_result_us` is what the calling thread sees of a single batch.
//
//   kvq_bench_gpu_transcode [--commit C] [--date D] [--out transcode.json]
#include <cuda_runtime.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_transcode.h"
#include "kernels/cuda/entries.h"
#include "kernels/half.h"
#include "tests/bench/about_gpu.h"
#include "tests/bench/gpu_transcode/append.h"
#include "tests/bench/gpu_transcode/plain_copy.h"
#include "tests/bench/gpu_transcode/train.h"

namespace kvq {
namespace {

using Clock = std::chrono::steady_clock;

using test::must;

// Time of one call's work on the stream, between two events.
std::vector<double> time_us(
    cudaStream_t stream, int samples, const std::function<void(int)>& call,
    const std::function<void()>& finish = [] {}) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  std::vector<double> us;
  for (int i = -2; i < samples; ++i) {
    must(cudaEventRecord(begin, stream), "event");
    call(i + 2);
    must(cudaEventRecord(end, stream), "event");
    finish();
    must(cudaStreamSynchronize(stream), "work on the GPU");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 0) us.push_back(ms * 1000.0);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return us;
}

ModelGeometry llama(std::uint16_t d, Dtype dtype) {  // Llama-3-8B has d = 128
  ModelGeometry g;
  g.layers = 32;
  for (std::uint32_t i = 0; i < g.layers; ++i) g.layer[i] = {8, d, dtype, 0};
  return g;
}

const char* name_of(Format format) {
  constexpr const char* kNames[] = {"none", "dense", "int4", "int4_k4", "int4_k8", "k8v4"};
  static_assert(std::size(kNames) == kFormatCount);
  return kNames[static_cast<std::size_t>(format)];
}

class Bench {
 public:
  Bench(bench::Rows& rows, std::uint32_t pages) : rows_(rows), pages_(pages) {
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    bytes_ = make_layout(llama(128, Dtype::fp16), Format::dense).page_bytes * pages;
    must(cudaMalloc(reinterpret_cast<void**>(&in_), bytes_), "device memory");
    must(cudaMalloc(reinterpret_cast<void**>(&out_), bytes_), "device memory");
  }
  ~Bench() {
    cudaFree(in_);
    cudaFree(out_);
    cudaStreamDestroy(stream_);
  }

  // TB/s, read and written.
  double copy() {
    const std::uint64_t bytes = std::uint64_t{4} << 30;
    const auto us = time_us(
        stream_, 9, [&](int) { must(cudaMemcpyAsync(out_, in_, bytes, cudaMemcpyDeviceToDevice, stream_), "copy"); });
    return 2.0 * static_cast<double>(bytes) / bench::quantile(us, 0.5) * 1e-6;
  }

  void set_ceiling(double copy_tb_s) {
    copy_tb_s_ = copy_tb_s;
    rows_.ceiling("copy_tb_s", copy_tb_s);
  }

  // Pages of the source format, in every slot of in_: a few of random content, over and over.
  void fill(const ModelGeometry& g, Format format) {
    const PageLayout dense = make_layout(g, Format::dense), to = make_layout(g, format);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<std::byte> page(dense.page_bytes);
    auto* aligned = static_cast<std::byte*>(std::aligned_alloc(256, to.page_bytes));
    constexpr std::uint32_t kDistinct = 3;
    const auto pages = static_cast<std::uint32_t>(std::min<std::uint64_t>(pages_, bytes_ / to.page_bytes));
    for (std::uint32_t i = 0; i < pages; ++i) {
      if (i < kDistinct) {
        for (std::uint64_t e = 0; e < page.size() / 2; ++e) {
          const std::uint16_t bits =
              g.layer[0].dtype == Dtype::fp16 ? float_to_half(normal(random)) : float_to_bf16(normal(random));
          std::memcpy(page.data() + 2 * e, &bits, 2);
        }
        KVQ_ASSERT(transcode_page(g, dense, page.data(), to, aligned));
        must(cudaMemcpy(in_ + i * to.page_bytes, aligned, to.page_bytes, cudaMemcpyHostToDevice), "upload");
      } else {
        must(cudaMemcpyAsync(in_ + i * to.page_bytes, in_ + i % kDistinct * to.page_bytes, to.page_bytes,
                             cudaMemcpyDeviceToDevice, stream_),
             "copy");
      }
    }
    std::free(aligned);
    must(cudaStreamSynchronize(stream_), "copy");
  }

  void rewrite(const char* name, const ModelGeometry& g, Format from, const Format* to, std::uint32_t batch) {
    const PageLayout a = make_layout(g, from), b = to != nullptr ? make_layout(g, *to) : PageLayout{};
    const auto launch = [&](cuda::Transcoder& transcoder, int turn) {
      std::vector<cuda::PageJob> jobs;
      const std::uint64_t first = std::uint64_t(turn) * batch % pages_;
      for (std::uint64_t slot = first; slot < first + batch; ++slot) {
        jobs.push_back({in_ + slot * a.page_bytes, out_ + slot * b.page_bytes});
      }
      const auto ticket = transcoder.launch(g, a, to != nullptr ? &b : nullptr, jobs);
      if (!ticket) throw std::runtime_error(ticket.error().context);
      return *ticket;
    };
    const auto collect = [&](cuda::Transcoder& transcoder, std::uint32_t ticket) {
      std::vector<cuda::PageJobDone> done(batch);
      while (!*transcoder.is_done(ticket)) {
      }
      transcoder.collect(ticket, done);
      for (const cuda::PageJobDone& job : done) KVQ_ASSERT(job.code == Errc::ok);
    };
    const int launches = static_cast<int>(std::clamp(512 / batch, 1u, 64u)), samples = batch > 100 ? 7 : 15;
    const auto train = [&](int batches) {  // in flight for each transcoder
      std::vector<std::unique_ptr<cuda::Transcoder>> transcoders;
      for (int i = 0; i < launches; i += batches) transcoders.push_back(transcoder(batch, batches));
      const auto us = bench::train_us(stream_, launches, samples, [&](int i) { launch(*transcoders[i / batches], i); });
      for (int i = 0; i < launches; ++i) collect(*transcoders[i / batches], i % batches);
      return us;
    };
    const double bytes = static_cast<double>(batch) * static_cast<double>(a.page_bytes + b.page_bytes);
    const auto copy_us = [&](bool overlap) {
      const auto half = static_cast<std::uint64_t>(bytes / 2) / 256 * 256;
      return bench::quantile(bench::train_us(stream_, launches, samples,
                                             [&](int i) {
                                               const std::uint64_t at = std::uint64_t(i) * half;
                                               bench::plain_copy(in_ + at, out_ + at, half, overlap, stream_);
                                             }),
                             0.5);
    };
    const auto us = train(launches);
    const double median = bench::quantile(us, 0.5), alone = bench::quantile(train(1), 0.5);
    const std::string shape =
        std::to_string(batch) + " pages,32 layers,8 heads,d" + std::to_string(g.layer[0].head_dim);
    nlohmann::json more{{"bytes", bytes}, {"of_ceiling", bytes / median * 1e-6 / copy_tb_s_}, {"alone_us", alone}};
    if (to != nullptr) {
      more["of_copy_same_size"] = copy_us(true) / median;
      more["alone_of_copy_same_size"] = copy_us(false) / alone;
    }
    if (batch <= 128) {
      std::vector<double> seen_us, call_us;
      const auto single = transcoder(batch, 1);
      for (int i = -2; i < 101; ++i) {
        must(cudaStreamSynchronize(stream_), "work on the GPU");
        const auto began = Clock::now();
        const std::uint32_t ticket = launch(*single, i + 2);
        const auto launched = Clock::now();
        while (!*single->is_done(ticket)) {
        }
        if (i >= 0) seen_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count());
        if (i >= 0) call_us.push_back(std::chrono::duration<double, std::micro>(launched - began).count());
        collect(*single, ticket);
      }
      more["call_us"] = bench::quantile(call_us, 0.5);  // until launch() returns
      more["call_to_result_us"] = bench::quantile(seen_us, 0.5);
    }
    rows_.times(name, shape, us, more);
  }

  // What a single copy by the driver looks like to the calling thread, beside call_to_result_us.
  void copy_call(std::uint64_t bytes) {
    cudaEvent_t end;
    must(cudaEventCreateWithFlags(&end, cudaEventDisableTiming), "event");
    std::vector<double> us;
    for (std::uint64_t i = 0; i < 101; ++i) {
      must(cudaStreamSynchronize(stream_), "work on the GPU");
      const auto began = Clock::now();
      must(cudaMemcpyAsync(out_ + i * bytes, in_ + i * bytes, bytes, cudaMemcpyDeviceToDevice, stream_), "copy");
      must(cudaEventRecord(end, stream_), "event");
      while (cudaEventQuery(end) == cudaErrorNotReady) {
      }
      us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count());
    }
    cudaEventDestroy(end);
    rows_.times("driver_copy_call_to_event", std::to_string(2 * bytes) + " bytes", us, {{"bytes", 2 * bytes}});
  }

  void entries(const char* name, cuda::EntryPath path, std::uint32_t count) {
    constexpr int kCalls = 100;
    auto* directory = reinterpret_cast<std::uint64_t*>(out_);
    std::vector<cuda::EntryWrite> writes(count);
    for (std::uint32_t i = 0; i < count; ++i) writes[i] = {path == cuda::EntryPath::copy ? i : i * 37 % 65536, i};
    std::vector<double> host_us;
    const auto us = time_us(stream_, 15, [&](int) {
      const auto began = Clock::now();
      for (int i = 0; i < kCalls; ++i) KVQ_ASSERT(cuda::write_entries(directory, writes, stream_, path));
      host_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count() / kCalls);
    });
    rows_.document(name, std::to_string(count) + " entries",
                   {{"median_us", bench::quantile(us, 0.5) / kCalls},
                    {"value", bench::quantile(host_us, 0.5)},
                    {"unit", "us of the calling thread"}});
  }

  void appends() { bench::append_rows(rows_, in_, pages_, out_, stream_); }

 private:
  std::unique_ptr<cuda::Transcoder> transcoder(std::uint32_t batch, int batches) const {
    auto made = cuda::Transcoder::create(batch, static_cast<std::uint32_t>(batches), stream_);
    if (!made) throw std::runtime_error(made.error().context);
    return std::move(*made);
  }

  bench::Rows& rows_;
  std::uint32_t pages_;
  cudaStream_t stream_ = nullptr;
  std::byte *in_ = nullptr, *out_ = nullptr;
  std::uint64_t bytes_ = 0;  // of each
  double copy_tb_s_ = 1;
};

void measure(bench::Rows& rows, Bench& bench) {
  bench.set_ceiling(bench.copy());
  const Format dense = Format::dense, int4 = Format::int4;
  const ModelGeometry g = llama(128, Dtype::fp16), other = llama(128, Dtype::bf16);
  bench.fill(g, dense);
  for (const std::uint32_t batch : {1u, 4u, 16u, 128u, 1024u}) bench.rewrite("fp16_to_int4", g, dense, &int4, batch);
  bench.copy_call((make_layout(g, dense).page_bytes + make_layout(g, int4).page_bytes) / 2 / 256 * 256);
  bench.fill(other, dense);
  for (const std::uint32_t batch : {1u, 1024u}) {
    for (const Format to : {int4, Format::int4_k4, Format::int4_k8, Format::k8v4, dense}) {
      bench.rewrite((std::string("bf16_to_") + name_of(to)).c_str(), other, dense, &to, batch);
    }
    bench.rewrite("sum_dense", other, dense, nullptr, batch);
  }
  for (const Format from : {int4, Format::int4_k4, Format::int4_k8, Format::k8v4}) {
    bench.fill(other, from);
    for (const std::uint32_t batch : {1u, 1024u}) {
      bench.rewrite((std::string(name_of(from)) + "_to_bf16").c_str(), other, from, &dense, batch);
    }
    if (from == int4) bench.rewrite("copy_int4", other, int4, &int4, 1024);
  }
  for (const std::uint16_t d :
       {std::uint16_t{64}, std::uint16_t{80}, std::uint16_t{96}, std::uint16_t{192}, std::uint16_t{256}}) {
    const ModelGeometry shape = llama(d, Dtype::fp16);
    bench.fill(shape, dense);
    const std::uint32_t batch = d > 128 ? 512 : 1024;
    bench.rewrite("fp16_to_int4", shape, dense, &int4, batch);
    bench.rewrite("fp16_to_int4", shape, dense, &int4, 1);
  }
  bench.appends();
  for (const std::uint32_t count : {1u, 16u, 256u}) {
    bench.entries("entries_operations", cuda::EntryPath::memory_operations, count);
    bench.entries("entries_kernel", cuda::EntryPath::kernel, count);
    bench.entries("entries_copy", cuda::EntryPath::copy, count);
  }
  rows.value("copy_at_the_end", "4 GiB", bench.copy(), "TB/s");  // whether the card has slowed down meanwhile
}

int run(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  bench::Rows rows(bench::about_gpu("transcode", "kvq_bench_gpu_transcode", arguments), arguments.text("out"));
  Bench bench(rows, 1024);
  measure(rows, bench);
  rows.write();
  return 0;
}

}  // namespace
}  // namespace kvq

int main(int argc, char** argv) {
  try {
    return kvq::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvq_bench_gpu_transcode: %s\n", error.what());
    return 1;
  }
}
