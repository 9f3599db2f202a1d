// Device copies of what the kernel tests make on the host, and what surrounds every run: poison, canaries, a fault
// word.
//
// Invariant: outputs and workspace are NaN before each run, every buffer has a canary behind its end, and a CUDA error
// fails the test that met it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "../attend_fixture.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/prefill_shape.h"

namespace kvq {

inline void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::abort();
}
#define MUST(call) ::kvq::must(call, #call)

class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t size) : size_(size) {
    MUST(cudaMalloc(&data_, size + kCanary));
    MUST(cudaMemset(data_, 0xff, size + kCanary));
  }
  DeviceBytes(const void* from, std::size_t size) : DeviceBytes(size) { write(from, size); }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;

  void write(const void* from, std::size_t size, std::size_t at = 0) {
    if (size != 0) MUST(cudaMemcpy(static_cast<char*>(data_) + at, from, size, cudaMemcpyHostToDevice));
  }
  void read(void* to, std::size_t size, std::size_t at = 0) const {
    if (size != 0) MUST(cudaMemcpy(to, static_cast<char*>(data_) + at, size, cudaMemcpyDeviceToHost));
  }
  void poison() { MUST(cudaMemset(data_, 0xff, size_)); }
  bool canary_lives() const {
    unsigned char bytes[kCanary];
    read(bytes, kCanary, size_);
    return std::all_of(bytes, bytes + kCanary, [](unsigned char b) { return b == 0xff; });
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kCanary = 512;
  std::size_t size_;
  void* data_ = nullptr;
};

// Mapped host memory, as libkvq's is.
class FaultWord {
 public:
  FaultWord() {
    MUST(cudaHostAlloc(reinterpret_cast<void**>(&host_), 8, cudaHostAllocMapped));
    MUST(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device), host_, 0));
    *host_ = 0;
  }
  ~FaultWord() { cudaFreeHost(host_); }
  FaultWord(const FaultWord&) = delete;
  // The word, which is then empty again. The device must be idle.
  std::uint64_t take() { return std::exchange(*host_, 0); }
  std::uint64_t* device = nullptr;

 private:
  std::uint64_t* host_ = nullptr;
};

// A PagePool's arena and directory on the device.
class DevicePool {
 public:
  explicit DevicePool(PagePool& pool) : pool_(pool), arena_(pool.arena_bytes()), entries_(8 * pool.source().capacity) {
    arena_.write(pool.source().arena, pool.arena_bytes());
    update_entries();
  }
  void update_entries() { entries_.write(pool_.source().entries, 8 * pool_.source().capacity); }
  PageSource source() const {
    return {entries_.as<const DirectoryEntry>(), pool_.source().capacity, arena_.as<std::byte>()};
  }
  DeviceBytes& arena() { return arena_; }

 private:
  PagePool& pool_;
  DeviceBytes arena_, entries_;
};

// The bounds that kernels/cuda/attend_kernel.cuh states, or with many rows (`many`) prefill_kernel.cuh.
inline double device_logit_error(const oracle::Row& row, const AttentionCall& call, bool many = false) {
  const Dtype dtype = call.model.geometry->layer[call.layer].dtype;
  double operands = row.quantized ? 0x1p-10 : dtype == Dtype::bf16 && call.q_type != Real::bf16 ? 0x1p-16 : 0;
  if (many && row.quantized && dtype == Dtype::bf16) operands = 0x1p-6;
  return 4 * row.logit_error + operands * row.spread;
}
inline double device_bound(const oracle::Row& row, const AttentionCall& call, bool many = false) {
  const bool bf16 = call.model.geometry->layer[call.layer].dtype == Dtype::bf16;
  const double keys = *std::max_element(call.lengths, call.lengths + call.batch);
  const double weights = many ? (bf16 ? 0x1p-7 : 0x1p-10) + keys * 0x1p-27 : 0x1p-10;
  return (std::expm1(2 * device_logit_error(row, call, many)) + weights) * row.max_value + 0x1p-24;
}

// A Problem's call on the device.
class DeviceProblem {
 public:
  explicit DeviceProblem(Problem& problem)
      : problem_(problem),
        pool(problem.pool()),
        tables_(problem.tables().data(), problem.tables().size() * 4),
        lengths_(problem.call().lengths, problem.call().batch * 4),
        starts_(problem.call().query_starts, (problem.call().batch + 1) * 4),
        queries_(problem.call().q, query_bytes(problem.call())),
        out_(problem.call().out_head_stride * problem.call().query_heads * element_bytes(problem.call().out_type)),
        lse_(std::max(1, problem.call().query_starts[problem.call().batch]) * problem.call().query_heads * 4),
        workspace_(*cuda::workspace_bytes(problem.call().model, problem.call().query_heads)) {
    launch.fault = fault.device;
    launch.workspace = workspace_.as<void>();
    launch.workspace_bytes = workspace_.size();
  }

  AttentionCall device_call() {
    AttentionCall call = problem_.call();
    call.pages = pool.source();
    call.block_tables = tables_.as<std::int32_t>();
    call.lengths = lengths_.as<std::int32_t>();
    call.query_starts = starts_.as<std::int32_t>();
    call.q = queries_.as<void>();
    call.out = out_.as<void>();
    call.lse = lse_.as<float>();
    const auto copy = [&](const float*& values, std::unique_ptr<DeviceBytes>& bytes) {
      if (values == nullptr) return;
      bytes = std::make_unique<DeviceBytes>(values, call.query_heads * 4);
      values = bytes->as<float>();
    };
    copy(call.alibi, alibi_);
    copy(call.sinks, sinks_);
    return call;
  }
  void update_tables() { tables_.write(problem_.tables().data(), problem_.tables().size() * 4); }
  void update_lengths(const std::vector<std::int32_t>& lengths) { lengths_.write(lengths.data(), lengths.size() * 4); }

  // One call; results come back to the host.
  Result<void> run() {
    poison();
    const Result<void> done = cuda::attend(device_call(), launch);
    if (!done) return done;
    collect();
    return done;
  }
  void poison() {
    out_.poison();
    lse_.poison();
    workspace_.poison();
  }
  void collect() {
    MUST(cudaDeviceSynchronize());
    out.resize(out_.size());
    lse.resize(lse_.size() / 4);
    out_.read(out.data(), out_.size());
    lse_.read(lse.data(), lse_.size());
    EXPECT_TRUE(out_.canary_lives() && lse_.canary_lives() && workspace_.canary_lives());
  }

  double output(std::size_t row, std::uint32_t c) const {
    const AttentionCall& call = problem_.call();
    const std::size_t token = row / call.query_heads, head = row % call.query_heads;
    return real_at(out.data(), call.out_type, token * call.out_token_stride + head * call.out_head_stride + c);
  }

  // Whether the hint and the call choose a kernel for many rows, where the GPU has them.
  bool many_rows() const {
    const AttentionCall& call = problem_.call();
    const LayerSpec& spec = call.model.geometry->layer[call.layer];
    return static_cast<int>(call.q_type) == static_cast<int>(spec.dtype) &&
           (spec.head_dim == 64 || spec.head_dim == 128) &&
           launch.max_query_tokens * (call.query_heads / spec.kv_heads) > cuda::kFewRows;
  }

  // Compares the rows with `expected`; `only` limits it to one sequence. Returns the largest share of its bound that
  // was used.
  double compare(const std::vector<oracle::Row>& expected, const std::string& what, int only = -1) {
    const AttentionCall& call = problem_.call();
    const std::uint32_t d = call.model.geometry->layer[call.layer].head_dim;
    double worst = 0;
    for (std::size_t r = 0; r < expected.size(); ++r) {
      const std::size_t token = r / call.query_heads + call.query_starts[0];
      if (only >= 0 && !(call.query_starts[only] <= int(token) && int(token) < call.query_starts[only + 1])) continue;
      const oracle::Row& row = expected[r];
      const Bounds bounds{device_bound(row, call, many_rows()),
                          device_logit_error(row, call, many_rows()) + 0x1p-10 + 0x1p-20 * std::fabs(row.lse)};
      if (!check_row(
              what, r, row, call.out_type, bounds, [&](std::uint32_t c) { return output(r, c); }, lse[r], worst))
        return worst;
    }
    EXPECT_TRUE(gaps_live(d)) << what;
    return worst;
  }
  double check(const std::vector<oracle::Row>& expected, const std::string& what) {
    const Result<void> done = run();
    EXPECT_TRUE(done) << done.error().context;
    EXPECT_EQ(fault.take(), 0u) << what;
    return done ? compare(expected, what) : 0;
  }

  // Elements between rows, which nobody may write.
  bool gaps_live(std::uint32_t d) const {
    const AttentionCall& call = problem_.call();
    const std::size_t width = element_bytes(call.out_type), stride = call.out_token_stride * width;
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (i % stride >= d * width && out[i] != 0xff) return false;
    }
    return true;
  }

  static std::size_t element_bytes(Real type) { return type == Real::fp32 ? 4 : 2; }

 private:
  static std::size_t query_bytes(const AttentionCall& call) {
    return std::size_t(call.query_starts[call.batch]) * call.q_token_stride * element_bytes(call.q_type);
  }
  Problem& problem_;

 public:
  DevicePool pool;
  FaultWord fault;
  cuda::Launch launch;
  std::vector<std::uint8_t> out;
  std::vector<float> lse;

 private:
  DeviceBytes tables_, lengths_, starts_, queries_, out_, lse_, workspace_;
  std::unique_ptr<DeviceBytes> alibi_, sinks_;
};

// Captures one call, and replays it over other lengths and tables.
inline void check_replays(Problem& problem, DeviceProblem& device,
                          const std::vector<std::vector<std::int32_t>>& all_lengths) {
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  device.launch.stream = stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_TRUE(cuda::attend(device.device_call(), device.launch));
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  for (const std::vector<std::int32_t>& lengths : all_lengths) {
    problem.call().lengths = lengths.data();
    device.update_lengths(lengths);
    std::swap(problem.tables()[0], problem.tables()[1]);
    device.update_tables();
    device.poison();
    MUST(cudaDeviceSynchronize());
    MUST(cudaGraphLaunch(replay, stream));
    MUST(cudaStreamSynchronize(stream));
    device.collect();
    EXPECT_EQ(device.fault.take(), 0u);
    device.compare(oracle::attend(problem.call()), "replay");
  }
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
  MUST(cudaStreamDestroy(stream));
}

}  // namespace kvq
