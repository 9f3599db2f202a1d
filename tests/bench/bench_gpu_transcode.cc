// Transcodes on the GPU beside a plain copy of device memory, and directory entries written in stream order.
//
// Invariant: bytes are those read plus those written, checksums are computed in every row, the share of the ceiling is
// against the copy of this same run; sources and destinations are many times the second-level cache and taken in turn.
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

class Bench {
 public:
  Bench(bench::Rows& rows, std::uint32_t pages) : rows_(rows), pages_(pages) {
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    const std::uint64_t dense = make_layout(llama(128, Dtype::fp16), Format::dense).page_bytes;
    must(cudaMalloc(reinterpret_cast<void**>(&in_), dense * pages), "device memory");
    must(cudaMalloc(reinterpret_cast<void**>(&out_), dense * pages), "device memory");
    auto made = cuda::Transcoder::create(pages, 2, stream_);
    if (!made) throw std::runtime_error(made.error().context);
    transcoder_ = std::move(*made);
  }
  ~Bench() {
    transcoder_.reset();
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
    for (std::uint32_t i = 0; i < pages_; ++i) {
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

  void rewrite(const char* name, const ModelGeometry& g, Format from, const Format* to, std::uint32_t batch,
               int samples) {
    const PageLayout a = make_layout(g, from), b = to != nullptr ? make_layout(g, *to) : PageLayout{};
    const auto jobs_from = [&](int turn) {
      std::vector<cuda::PageJob> jobs;
      for (std::uint32_t i = 0; i < batch; ++i) {
        const std::uint64_t slot = (std::uint64_t(turn) * batch * 7 + i) % pages_;
        jobs.push_back({in_ + slot * a.page_bytes, out_ + slot * b.page_bytes});
      }
      return jobs;
    };
    std::vector<double> until_seen_us;
    std::uint32_t ticket = 0;
    Clock::time_point began;
    const auto launch = [&](int turn) {
      const auto jobs = jobs_from(turn);
      began = Clock::now();
      const auto launched = transcoder_->launch(g, a, to != nullptr ? &b : nullptr, jobs);
      KVQ_ASSERT(launched);
      ticket = *launched;
    };
    const auto finish = [&] {
      while (!*transcoder_->is_done(ticket)) {
      }
      until_seen_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count());
      std::vector<cuda::PageJobDone> done(batch);
      transcoder_->collect(ticket, done);
      for (const cuda::PageJobDone& job : done) KVQ_ASSERT(job.code == Errc::ok);
    };
    const auto us = time_us(stream_, samples, launch, finish);
    const double bytes = static_cast<double>(batch) * static_cast<double>(a.page_bytes + b.page_bytes);
    const double median = bench::quantile(us, 0.5), share = bytes / median * 1e-6 / copy_tb_s_;
    const std::string shape =
        std::to_string(batch) + " pages,32 layers,8 heads,d" + std::to_string(g.layer[0].head_dim);
    rows_.times(name, shape, us,
                {{"bytes", bytes}, {"of_ceiling", share}, {"until_seen_us", bench::quantile(until_seen_us, 0.5)}});
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

 private:
  bench::Rows& rows_;
  std::uint32_t pages_;
  cudaStream_t stream_ = nullptr;
  std::byte *in_ = nullptr, *out_ = nullptr;
  std::unique_ptr<cuda::Transcoder> transcoder_;
  double copy_tb_s_ = 1;
};

void measure(bench::Rows& rows, Bench& bench) {
  bench.set_ceiling(bench.copy());
  const Format dense = Format::dense, int4 = Format::int4, k4 = Format::int4_k4, k8 = Format::int4_k8,
               k8v4 = Format::k8v4;
  for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
    const ModelGeometry g = llama(128, dtype);
    bench.fill(g, dense);
    const char* name = dtype == Dtype::fp16 ? "fp16_to_int4" : "bf16_to_int4";
    for (const std::uint32_t batch : {1u, 16u, 128u, 1024u})
      bench.rewrite(name, g, dense, &int4, batch, batch == 1 ? 101 : 15);
  }
  const ModelGeometry g = llama(128, Dtype::bf16), small = llama(64, Dtype::fp16), odd = llama(96, Dtype::fp16);
  bench.rewrite("bf16_to_int4_k4", g, dense, &k4, 1024, 9);
  bench.rewrite("bf16_to_int4_k8", g, dense, &k8, 1024, 9);
  bench.rewrite("bf16_to_k8v4", g, dense, &k8v4, 1024, 9);
  bench.rewrite("copy_dense", g, dense, &dense, 1024, 9);
  bench.rewrite("copy_dense", g, dense, &dense, 1, 101);
  bench.rewrite("sum_dense", g, dense, nullptr, 1024, 9);
  bench.rewrite("sum_dense", g, dense, nullptr, 1, 101);
  bench.fill(g, int4);
  bench.rewrite("int4_to_bf16", g, int4, &dense, 1024, 9);
  bench.rewrite("int4_to_bf16", g, int4, &dense, 1, 101);
  bench.rewrite("copy_int4", g, int4, &int4, 1024, 9);
  bench.fill(small, dense);
  bench.rewrite("fp16_to_int4", small, dense, &int4, 1024, 9);
  bench.rewrite("fp16_to_int4", small, dense, &int4, 1, 101);
  bench.fill(odd, dense);
  bench.rewrite("fp16_to_int4", odd, dense, &int4, 1024, 9);
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
