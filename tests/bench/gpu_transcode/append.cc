// Tokens of one sequence each (decode), or 64 to a page (prefill).
#include "tests/bench/gpu_transcode/append.h"

#include <algorithm>

#include "kernels/cuda/cuda_kernels.h"
#include "tests/bench/gpu_transcode/plain_copy.h"
#include "tests/bench/gpu_transcode/train.h"

namespace kvq::bench {
namespace {

constexpr std::uint32_t kLayers = 32, kHeads = 8, kDim = 128;
constexpr int kSamples = 15;

struct Target {
  ModelGeometry geometry;
  PageLayout layouts[kFormatCount];
  test::DeviceBytes directory;
  std::byte* arena;
  std::uint32_t pages;

  Target(std::byte* memory, std::uint32_t count)
      : directory(8 * (std::size_t{count} + 1)), arena(memory), pages(count) {
    geometry.layers = kLayers;
    for (std::uint32_t i = 0; i < kLayers; ++i) geometry.layer[i] = {kHeads, kDim, Dtype::fp16, 0};
    const PageLayout& dense = layouts[static_cast<std::size_t>(Format::dense)] = make_layout(geometry, Format::dense);
    std::vector<std::uint64_t> entries(pages + 1, 0);
    for (std::uint32_t i = 1; i <= pages; ++i) {
      entries[i] = pack_entry({1, Format::dense, EntryState::open, (i - 1) * dense.page_bytes});
    }
    MUST(cudaMemcpy(directory.as<void>(), entries.data(), 8 * entries.size(), cudaMemcpyHostToDevice));
  }
};

}  // namespace

void append_rows(Rows& rows, std::byte* arena, std::uint32_t pages, std::byte* source, cudaStream_t stream) {
  const Target target(arena, pages);
  std::uint64_t* fault = nullptr;
  MUST(cudaHostAlloc(reinterpret_cast<void**>(&fault), 8, cudaHostAllocMapped));
  *fault = 0;
  const auto measure = [&](const char* name, std::uint32_t tokens, std::uint32_t in_page) {
    std::vector<std::int64_t> slots(tokens);
    for (std::uint32_t i = 0; i < tokens; ++i) {
      slots[i] = std::int64_t{1 + i / in_page * 5 % pages} * kPageTokens + (in_page == 1 ? i * 7 % 64 : i % 64);
    }
    const test::DeviceBytes where(slots);
    const std::uint64_t bytes = std::uint64_t{tokens} * kHeads * kDim * 2;  // of K, and of V
    const auto append = [&](int layer) {
      AppendCall call;
      call.model = {&target.geometry, target.layouts};
      call.pages = {target.directory.as<DirectoryEntry>(), target.pages + 1, target.arena};
      call.layer = static_cast<std::uint32_t>(layer);
      call.k = source + 2 * bytes * static_cast<std::uint32_t>(layer);
      call.v = static_cast<const std::byte*>(call.k) + bytes;
      call.k_token_stride = call.v_token_stride = kHeads * kDim;
      call.k_head_stride = call.v_head_stride = kDim;
      call.slots = where.as<std::int64_t>();
      call.tokens = tokens;
      cuda::Launch launch;
      launch.stream = stream;
      launch.fault = fault;
      if (!cuda::append(call, launch)) throw std::runtime_error("append is refused");
    };
    const auto copy = [&](int layer) {
      const std::uint64_t at = 2 * bytes * static_cast<std::uint32_t>(layer);
      plain_copy(source + at, arena + at, 2 * bytes, false, stream);
    };
    const auto us = train_us(stream, kLayers, kSamples, append), copy_us = train_us(stream, kLayers, kSamples, copy);
    if (*fault != 0) throw std::runtime_error("append met a wrong slot");
    const double copied = quantile(copy_us, 0.5);
    rows.times(name, std::to_string(tokens) + " tokens,one layer,8 heads,d128", us,
               {{"bytes", 4.0 * static_cast<double>(bytes)},
                {"copy_us", copied},
                {"of_copy_same_size", copied / quantile(us, 0.5)}});
  };
  for (const std::uint32_t tokens : {1u, 16u, 64u, 256u}) measure("append_decode", tokens, 1);
  for (const std::uint32_t tokens : {64u, 256u, 1024u, 4096u}) measure("append_prefill", tokens, kPageTokens);
  cudaFreeHost(fault);
}

}  // namespace kvq::bench
