// Host kernels against the memory they run on: attention in bytes of pages per second beside a plain read of the same
// bytes, transcode beside memcpy of as many bytes.
//
// Invariant: every data set is several times the last-level share that a core can keep, pages are visited in random
// order, and the plain read visits the same pages, so the ratio of two rows is the share of the ceiling.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/half.h"
#include "kernels/host_kernels.h"

namespace kvq {
namespace {

constexpr std::size_t kPoolBytes = std::size_t{1} << 30;

// One layer, eight KV heads; a pool of pages of one format, filled once.
struct Pool {
  ModelGeometry geometry;
  std::vector<PageLayout> layouts{kFormatCount};
  std::unique_ptr<DirectoryEntry[]> entries;
  std::byte* arena = nullptr;
  std::uint32_t pages = 0;
  std::uint64_t page_bytes = 0;
  std::vector<std::int32_t> table;

  Pool(Format format, std::uint32_t d, Dtype dtype) {
    geometry.layers = 1;
    geometry.layer[0] = {8, static_cast<std::uint16_t>(d), dtype, 0};
    for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts[f] = make_layout(geometry, static_cast<Format>(f));
    page_bytes = layouts[raw_format(format)].page_bytes;
    pages = static_cast<std::uint32_t>(kPoolBytes / page_bytes);
    arena =
        static_cast<std::byte*>(mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    KVQ_ASSERT(arena != MAP_FAILED);
    fill(format, dtype);
    entries = std::make_unique<DirectoryEntry[]>(pages + 1);
    entries[0] = pack_entry({0, Format::none, EntryState::null, 0});
    for (std::uint32_t i = 0; i < pages; ++i) {
      entries[i + 1] = pack_entry({1, format, EntryState::sealed, i * page_bytes});
    }
    table.resize(pages);
    std::iota(table.begin(), table.end(), 1);
    std::shuffle(table.begin(), table.end(), std::mt19937(7));
  }
  ~Pool() { munmap(arena, kPoolBytes); }

  static std::uint32_t raw_format(Format f) { return static_cast<std::uint32_t>(f); }

  void fill(Format format, Dtype dtype) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const PageLayout& dense = layouts[raw_format(Format::dense)];
    std::vector<std::byte> one(dense.page_bytes), page(page_bytes);
    auto* x = reinterpret_cast<std::uint16_t*>(one.data());
    for (std::size_t i = 0; i < one.size() / 2; ++i) {
      x[i] = dtype == Dtype::fp16 ? float_to_half(normal(random)) : float_to_bf16(normal(random));
    }
    KVQ_ASSERT(transcode_page(geometry, dense, one.data(), layouts[raw_format(format)], page.data()));
    for (std::uint32_t i = 0; i < pages; ++i) std::memcpy(arena + i * page_bytes, page.data(), page_bytes);
  }
};

Pool& pool(Format format, std::uint32_t d) {
  static std::unique_ptr<Pool> kept;
  static Format kept_format;
  static std::uint32_t kept_d = 0;
  if (kept == nullptr || kept_format != format || kept_d != d) {
    kept.reset();
    kept = std::make_unique<Pool>(format, d, Dtype::fp16);
    kept_format = format;
    kept_d = d;
  }
  return *kept;
}

void decode(benchmark::State& state, Format format, std::uint32_t d, std::uint32_t group, int threads, int tokens) {
  Pool& p = pool(format, d);
  const std::uint32_t heads = 8 * group;
  const std::int32_t pages = static_cast<std::int32_t>(p.pages) / 16;  // a call reads 64 MB
  std::vector<float> q(std::size_t(tokens) * heads * d), out(q.size());
  std::mt19937 random(5);
  for (float& x : q) x = std::normal_distribution<float>()(random);
  const std::int32_t length = pages * 64, starts[2] = {0, tokens};
  AttentionCall call;
  call.model = {&p.geometry, p.layouts.data()};
  call.pages = {p.entries.get(), p.pages + 1, p.arena};
  call.batch = 1;
  call.block_table_stride = pages;
  call.lengths = &length;
  call.query_starts = starts;
  call.q = q.data();
  call.out = out.data();
  call.q_type = call.out_type = Real::fp32;
  call.query_heads = heads;
  call.q_token_stride = call.out_token_stride = std::int64_t{heads} * d;
  call.q_head_stride = call.out_head_stride = d;
  call.threads = threads;
  std::int32_t at = 0;
  for (auto _ : state) {
    call.block_tables = p.table.data() + at;
    KVQ_ASSERT(attend(call));
    at = at + 2 * pages > static_cast<std::int32_t>(p.pages) ? 0 : at + pages;
  }
  state.SetBytesProcessed(state.iterations() * pages * static_cast<std::int64_t>(p.page_bytes));
}

// The ceiling: every byte of the same pages, one block after the other, into a few sums, asked for some lines ahead
// (also across pages), as a reader that knows its block table can.
void read_pages(benchmark::State& state, Format format, std::uint32_t d) {
  constexpr std::size_t kAheadBytes = 2048;
  Pool& p = pool(format, d);
  const std::int32_t pages = static_cast<std::int32_t>(p.pages) / 16;
  const auto page_at = [&](std::int32_t i) { return p.arena + std::uint64_t(p.table[i] - 1) * p.page_bytes; };
  std::int32_t at = 0;
  for (auto _ : state) {
    std::uint64_t sum[8] = {};
    for (std::int32_t i = 0; i < pages; ++i) {
      const std::byte* page = page_at(at + i);
      const std::byte* next = page_at(at + std::min(i + 1, pages - 1));
      for (std::size_t b = 0; b < p.page_bytes; b += 64) {
        const std::size_t ahead = b + kAheadBytes;
        __builtin_prefetch(ahead < p.page_bytes ? page + ahead : next + (ahead - p.page_bytes));
        const auto* words = reinterpret_cast<const std::uint64_t*>(page + b);
        for (int j = 0; j < 8; ++j) sum[j] += words[j];
      }
    }
    benchmark::DoNotOptimize(sum);
    at = at + 2 * pages > static_cast<std::int32_t>(p.pages) ? 0 : at + pages;
  }
  state.SetBytesProcessed(state.iterations() * pages * static_cast<std::int64_t>(p.page_bytes));
}

// Bytes read plus bytes written, as for the copy beside it.
void transcode(benchmark::State& state, Format from, Format to, std::uint32_t d, bool copy) {
  Pool& p = pool(from, d);
  const PageLayout& a = p.layouts[Pool::raw_format(from)];
  const PageLayout& b = p.layouts[Pool::raw_format(to)];
  const std::uint32_t targets = static_cast<std::uint32_t>((std::size_t{256} << 20) / b.page_bytes);
  std::vector<std::byte> out(targets * b.page_bytes, std::byte{1});
  const std::uint64_t half = (a.page_bytes + b.page_bytes) / 2;
  std::uint32_t i = 0;
  for (auto _ : state) {
    const std::byte* src = p.arena + (p.table[i % p.pages] - 1) * p.page_bytes;
    std::byte* dst = out.data() + (i % targets) * b.page_bytes;
    if (copy) {
      std::memcpy(out.data() + (i % (out.size() / half)) * half, src, std::min(half, a.page_bytes));
    } else {
      KVQ_ASSERT(transcode_page(p.geometry, a, src, b, dst));
    }
    benchmark::ClobberMemory();
    ++i;
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(a.page_bytes + b.page_bytes));
}

#define KVQ_DECODE(name, format, d, group)                                            \
  BENCHMARK_CAPTURE(read_pages, name, format, d)->MinTime(1)->UseRealTime();          \
  BENCHMARK_CAPTURE(decode, name, format, d, group, 1, 1)->MinTime(1)->UseRealTime(); \
  BENCHMARK_CAPTURE(decode, name##_2threads, format, d, group, 2, 1)->MinTime(1)->UseRealTime()
KVQ_DECODE(dense_d128_gqa4, Format::dense, 128, 4);
BENCHMARK_CAPTURE(transcode, memcpy_of_dense_to_int4_d128, Format::dense, Format::int4, 128, true)->UseRealTime();
BENCHMARK_CAPTURE(transcode, dense_to_int4_d128, Format::dense, Format::int4, 128, false)->UseRealTime();
BENCHMARK_CAPTURE(transcode, dense_to_int4_k8_d128, Format::dense, Format::int4_k8, 128, false)->UseRealTime();
BENCHMARK_CAPTURE(transcode, dense_to_k8v4_d128, Format::dense, Format::k8v4, 128, false)->UseRealTime();
KVQ_DECODE(int4_d128_gqa4, Format::int4, 128, 4);
BENCHMARK_CAPTURE(transcode, int4_to_dense_d128, Format::int4, Format::dense, 128, false)->UseRealTime();
BENCHMARK_CAPTURE(decode, int4_d128_gqa4_64tokens, Format::int4, 128, 4, 1, 64)->UseRealTime();
KVQ_DECODE(dense_d64_gqa3, Format::dense, 64, 3);
BENCHMARK_CAPTURE(transcode, memcpy_of_dense_to_int4_d64, Format::dense, Format::int4, 64, true)->UseRealTime();
BENCHMARK_CAPTURE(transcode, dense_to_int4_d64, Format::dense, Format::int4, 64, false)->UseRealTime();
BENCHMARK_CAPTURE(decode, dense_d64_gqa3_64tokens, Format::dense, 64, 3, 1, 64)->UseRealTime();
KVQ_DECODE(int4_d64_gqa3, Format::int4, 64, 3);

}  // namespace
}  // namespace kvq

BENCHMARK_MAIN();
