// Decode on the device: int4, dense and mixed pages, beside a plain read of as much memory in the same run.
//
// Invariant: pages lie in random order, and consecutive launches read other pages until more than kRotationBytes have
// been read, so the second-level cache never helps. A time is the median over replays of one graph, divided by its
// launches.
//
//   kvq_bench_gpu_attend [--commit C] [--date D] [--out decode.json]
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_kernels.h"
#include "tests/bench/arguments.h"
#include "tests/bench/rows.h"

namespace kvq {
namespace {

constexpr std::uint32_t kHeads = 32, kKvHeads = 8, kD = 128;
constexpr std::uint64_t kRotationBytes = std::uint64_t{3} << 30;
constexpr int kReplays = 15, kMinLaunches = 12;

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}
#define MUST(call) must(call, #call)

struct DeviceMemory {
  explicit DeviceMemory(std::size_t bytes) { MUST(cudaMalloc(&data, bytes)); }
  ~DeviceMemory() { cudaFree(data); }
  DeviceMemory(const DeviceMemory&) = delete;
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  template <typename T>
  void write(const std::vector<T>& from) {
    MUST(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void* data = nullptr;
};

__device__ std::uint32_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185ull;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44dull;
  return static_cast<std::uint32_t>(x >> 32);
}

// fp16 pairs in [-1, 1); in an int4 page: codes, scales near 0.1, midpoints like values.
__global__ void fill(std::uint32_t* words, std::uint64_t count, bool codes) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const std::uint32_t bits = mixed(i);
    const float low = static_cast<float>(bits & 0xffff) / 32768 - 1, high = static_cast<float>(bits >> 16) / 32768 - 1;
    std::uint32_t word = __half_as_ushort(__float2half(low)) | std::uint32_t{__half_as_ushort(__float2half(high))}
                                                                   << 16;
    if (codes) {
      constexpr BlockOffsets at = block_offsets(Format::int4, kD);
      const std::uint32_t byte = static_cast<std::uint32_t>(i * 4 % at.end);
      if (byte < at.k_scale || (byte >= at.v && byte < at.v_scale)) word = bits;
      if ((byte >= at.k_scale && byte < at.k_mid) || (byte >= at.v_scale && byte < at.v_mid)) word = 0x2e662e66;
    }
    words[i] = word;
  }
}

__global__ void __launch_bounds__(256) read_all(const uint4* from, std::uint64_t count, std::uint32_t* sink) {
  constexpr int kLoads = 8;
  const std::uint64_t first = std::uint64_t{blockIdx.x} * blockDim.x * kLoads + threadIdx.x;
  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const std::uint64_t at = first + std::uint64_t(i) * blockDim.x;
    x[i] = at < count ? __ldcs(from + at) : uint4{};
  }
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) sum += x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
  if (sum == 0x12345678) *sink = sum;
}

constexpr std::uint64_t kBlockBytes = 256 * 8 * 16;  // of read_all and copy_all

__global__ void __launch_bounds__(256) copy_all(const uint4* from, uint4* to) {
  const std::uint64_t first = std::uint64_t{blockIdx.x} * (kBlockBytes / 16) + threadIdx.x;
  uint4 x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __ldcs(from + first + i * 256);
#pragma unroll
  for (int i = 0; i < 8; ++i) __stcs(to + first + i * 256, x[i]);
}

// The median time, in microseconds, of one of `launches` that `enqueue(i)` puts on the stream.
template <typename Enqueue>
double median_us(int launches, Enqueue enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t begin, end;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) enqueue(i, stream);
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<float> ms(kReplays);
  for (int i = -2; i < kReplays; ++i) {
    MUST(cudaEventRecord(begin, stream));
    MUST(cudaGraphLaunch(replay, stream));
    MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    if (i >= 0) MUST(cudaEventElapsedTime(&ms[i], begin, end));
  }
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
  MUST(cudaEventDestroy(begin));
  MUST(cudaEventDestroy(end));
  MUST(cudaStreamDestroy(stream));
  std::nth_element(ms.begin(), ms.begin() + kReplays / 2, ms.end());
  return 1000.0 * ms[kReplays / 2] / launches;
}

// One layer's pages in two regions: int4 and dense.
class Bench {
 public:
  Bench() {
    geometry_.layers = 1;
    geometry_.layer[0] = {kKvHeads, kD, Dtype::fp16, 0};
    for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts_[f] = make_layout(geometry_, static_cast<Format>(f));
    MUST(cudaMemGetInfo(&free_bytes_, &total_bytes_));
    arena_ = std::make_unique<DeviceMemory>(kArenaBytes);
    fill<<<4096, 256>>>(arena_->as<std::uint32_t>(), kDenseStart / 4, true);
    fill<<<4096, 256>>>(arena_->as<std::uint32_t>() + kDenseStart / 4, (kArenaBytes - kDenseStart) / 4, false);
    MUST(cudaDeviceSynchronize());
    MUST(cudaHostAlloc(reinterpret_cast<void**>(&fault_), 8, cudaHostAllocMapped));
    *fault_ = 0;
    const Result<std::size_t> bytes = cuda::workspace_bytes({&geometry_, layouts_.data()}, kHeads);
    if (!bytes) must(cudaErrorUnknown, bytes.error().context);
    workspace_bytes_ = *bytes;
    workspace_ = std::make_unique<DeviceMemory>(workspace_bytes_);
  }

  double read_ceiling() {
    constexpr std::uint64_t kBytes = std::uint64_t{4} << 30;
    DeviceMemory sink(4);
    const double us = median_us(4, [&](int, cudaStream_t stream) {
      read_all<<<static_cast<unsigned>(kBytes / kBlockBytes), 256, 0, stream>>>(arena_->as<uint4>(), kBytes / 16,
                                                                                sink.as<std::uint32_t>());
    });
    return ceiling_ = kBytes / us * 1e-6;
  }

  double copy_ceiling() {  // bytes read and bytes written
    constexpr std::uint64_t kBytes = std::uint64_t{2} << 30;
    DeviceMemory to(kBytes);
    const double us = median_us(4, [&](int, cudaStream_t stream) {
      copy_all<<<static_cast<unsigned>(kBytes / kBlockBytes), 256, 0, stream>>>(arena_->as<uint4>(), to.as<uint4>());
    });
    return 2 * kBytes / us * 1e-6;
  }

  void decode(bench::Rows& rows, const char* name, std::uint32_t batch, std::uint32_t context, double dense_share) {
    const std::uint32_t pages = context / kPageTokens * batch;
    const double bytes_each = dense_share * layouts_[1].page_bytes + (1 - dense_share) * layouts_[2].page_bytes;
    const int sets = static_cast<int>(std::clamp(kRotationBytes / (pages * bytes_each), 2.0, 40.0));
    std::uint64_t dense_pages = 0;
    place_pages(pages, sets, dense_share, dense_pages);
    const std::uint64_t elements = std::uint64_t{batch} * kHeads * kD;
    DeviceMemory q(elements * 2), out(elements * 2), lengths(batch * 4), starts(batch * 4 + 4);
    fill<<<64, 256>>>(q.as<std::uint32_t>(), elements / 2, false);
    std::vector<std::int32_t> numbers(batch + 1);
    std::iota(numbers.begin(), numbers.end(), 0);
    starts.write(numbers);
    lengths.write(std::vector<std::int32_t>(batch, static_cast<std::int32_t>(context)));
    MUST(cudaDeviceSynchronize());
    AttentionCall call;
    call.model = {&geometry_, layouts_.data()};
    call.pages = {entries_->as<const DirectoryEntry>(), capacity_, arena_->as<std::byte>()};
    call.batch = batch;
    call.block_table_stride = context / kPageTokens;
    call.lengths = lengths.as<std::int32_t>();
    call.query_starts = starts.as<std::int32_t>();
    call.query_heads = kHeads;
    call.q = q.data;
    call.out = out.data;
    call.q_token_stride = call.out_token_stride = kHeads * kD;
    call.q_head_stride = call.out_head_stride = kD;
    cuda::Launch launch;
    launch.fault = fault_;
    launch.workspace = workspace_->data;
    launch.workspace_bytes = workspace_bytes_;
    launch.max_query_tokens = 1;
    const int launches = std::max(sets, kMinLaunches / sets * sets);
    const double us = median_us(launches, [&](int i, cudaStream_t stream) {
      call.block_tables = tables_->as<std::int32_t>() + std::uint64_t(i % sets) * pages;
      launch.stream = stream;
      const Result<void> done = cuda::attend(call, launch);
      if (!done) must(cudaErrorUnknown, done.error().context);
    });
    if (*fault_ != 0) must(cudaErrorUnknown, "a page was not readable");
    const std::uint64_t bytes =
        (dense_pages * layouts_[1].page_bytes + (std::uint64_t{pages} * sets - dense_pages) * layouts_[2].page_bytes) /
        sets;
    rows.document(
        name, std::to_string(batch) + "x" + std::to_string(context),
        {{"median_us", us}, {"bytes", bytes}, {"of_ceiling", static_cast<double>(bytes) / us * 1e-6 / ceiling_}});
  }

 private:
  static constexpr std::uint64_t kArenaBytes = std::uint64_t{16} << 30, kDenseStart = std::uint64_t{5} << 30;

  // `sets` tables of `pages` pages each, in random places of the two regions.
  void place_pages(std::uint32_t pages, int sets, double dense_share, std::uint64_t& dense_pages) {
    std::mt19937_64 random(11);
    const std::uint64_t room[2] = {kDenseStart / layouts_[2].page_bytes,
                                   (kArenaBytes - kDenseStart) / layouts_[1].page_bytes};
    std::vector<std::uint32_t> order[2];
    for (int i = 0; i < 2; ++i) {
      order[i].resize(room[i]);
      std::iota(order[i].begin(), order[i].end(), 0);
      std::shuffle(order[i].begin(), order[i].end(), random);
    }
    const std::uint64_t count = std::uint64_t{pages} * sets;
    std::vector<std::uint64_t> entries(count + 1, pack_entry({0, Format::none, EntryState::null, 0}));
    std::vector<std::int32_t> table(count);
    std::uint64_t used[2] = {};
    for (std::uint64_t i = 0; i < count; ++i) {
      const int dense = std::uniform_real_distribution<>()(random) < dense_share;
      const std::uint64_t slot = order[dense][used[dense]++ % room[dense]];
      const Format format = dense ? Format::dense : Format::int4;
      const std::uint64_t offset = (dense ? kDenseStart : 0) + slot * layouts_[static_cast<int>(format)].page_bytes;
      entries[i + 1] = pack_entry({1, format, EntryState::sealed, offset});
      table[i] = static_cast<std::int32_t>(i + 1);
    }
    dense_pages = used[1];
    capacity_ = static_cast<std::uint32_t>(count + 1);
    entries_ = std::make_unique<DeviceMemory>(entries.size() * 8);
    entries_->write(entries);
    tables_ = std::make_unique<DeviceMemory>(table.size() * 4);
    tables_->write(table);
  }

  ModelGeometry geometry_;
  std::vector<PageLayout> layouts_{kFormatCount};
  std::unique_ptr<DeviceMemory> arena_, entries_, tables_, workspace_;
  std::size_t workspace_bytes_ = 0, free_bytes_ = 0, total_bytes_ = 0;
  std::uint32_t capacity_ = 0;
  double ceiling_ = 0;
  std::uint64_t* fault_ = nullptr;
};

int run(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  cudaDeviceProp device;
  int driver = 0;
  MUST(cudaGetDeviceProperties(&device, 0));
  MUST(cudaDriverGetVersion(&driver));
  bench::Rows rows({"decode", device.name, bench::driver_name(driver), arguments.text("date"), arguments.text("commit"),
                    arguments.command("kvq_bench_gpu_attend")},
                   arguments.text("out"));
  Bench bench;
  rows.ceiling("read_tb_s", bench.read_ceiling());
  rows.ceiling("copy_tb_s", bench.copy_ceiling());
  const std::uint32_t shapes[][2] = {{1, 131072}, {1, 1048576}, {8, 32768}, {64, 4096}};
  for (const auto& shape : shapes) {
    bench.decode(rows, "kvq_int4", shape[0], shape[1], 0);
    bench.decode(rows, "kvq_dense", shape[0], shape[1], 1);
    bench.decode(rows, "kvq_mixed5", shape[0], shape[1], 0.05);
  }
  rows.write();
  return 0;
}

}  // namespace
}  // namespace kvq

int main(int argc, char** argv) {
  try {
    return kvq::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvq_bench_gpu_attend: %s\n", error.what());
    return 1;
  }
}
