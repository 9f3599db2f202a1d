// The store's take-over alone, at sizes beyond this machine's memory, and what a checksum costs beside a plain read.
//
// Invariant: the store is taken over again and again from the same kept files, as a daemon that dies right after its
// start would leave them; pages have no memory behind them there. Checksums are taken of pages in random order, of a
// pool several times the caches.
#include <sys/mman.h>

#include <memory>
#include <numeric>
#include <random>

#include "daemon/device/checksum.h"
#include "kernels/half.h"
#include "kernels/host_kernels.h"
#include "tests/bench/bare_node.h"
#include "tests/bench/samples.h"
#include "tests/support/mortal_store.h"

namespace kvq::testing {
namespace {

constexpr int kTakeOvers = 15;

// Slabs of 256 pages each, `sequence` pages in each sequence.
void take_over(benchmark::State& state, std::uint32_t slabs, std::uint32_t pages, std::uint32_t sequence,
               std::uint32_t max_pages) {
  for (auto _ : state) {
    MapKeeper keeper;
    Node node(slabs, max_pages, &keeper);
    for (std::uint32_t s = 1; s <= pages / sequence; ++s) {
      if (!node.want(sequence)) return state.SkipWithError("no room");
      node.send_sequence(s, sequence, s);
      node.store->tick(++node.now_ms);
    }
    for (int i = 0; i < 3; ++i) node.store->tick(++node.now_ms);
    Samples samples;
    for (int i = 0; i < kTakeOvers; ++i) {
      node.store.reset();
      NoMemory device(slabs);
      Kept kept = keeper.hand_over();
      std::string why;
      const auto began = Clock::now();
      auto adopted = Store::adopt(node.config, device, nullptr, nullptr, keeper, kept, why, ++node.now_ms);
      samples.add(us_since(began));
      if (!adopted) return state.SkipWithError(why.c_str());
      const AdoptReport report = (*adopted)->status().adopt;
      if (report.pages < pages || report.sequences != pages / sequence || report.sessions != 1) {
        return state.SkipWithError("not all was taken over");
      }
    }
    samples.report(state);
  }
  state.counters["pages"] = pages;
  state.counters["slabs"] = slabs;
  state.counters["sequences"] = pages / sequence;
}
#define KVQ_TAKE_OVER(name, ...)                  \
  BENCHMARK_CAPTURE(take_over, name, __VA_ARGS__) \
      ->Iterations(1)                             \
      ->Repetitions(1)                            \
      ->UseManualTime()                           \
      ->Unit(benchmark::kMillisecond)
KVQ_TAKE_OVER(nothing, 64, 0, 1, 65'536);
KVQ_TAKE_OVER(nothing_of_1m_ids, 64, 0, 1, 1'048'576);
KVQ_TAKE_OVER(4k_pages, 64, 4'000, 100, 65'536);
KVQ_TAKE_OVER(50k_pages, 256, 50'000, 100, 65'536);
KVQ_TAKE_OVER(50k_pages_of_1m_ids, 256, 50'000, 100, 1'048'576);
KVQ_TAKE_OVER(50k_pages_1600_slabs, 1600, 50'000, 100, 65'536);
KVQ_TAKE_OVER(50k_pages_5k_sequences, 256, 50'000, 10, 65'536);
KVQ_TAKE_OVER(200k_pages_of_1m_ids, 800, 200'000, 100, 1'048'576);

// --- checksums

constexpr std::size_t kPoolBytes = std::size_t{512} << 20;

struct Pool {
  ModelGeometry geometry;
  PageLayout dense, int4;
  std::byte* memory;
  std::vector<std::size_t> order;

  Pool() {
    geometry.layers = 8;
    for (std::uint32_t i = 0; i < geometry.layers; ++i) geometry.layer[i] = {8, 128, Dtype::fp16, 0};
    dense = make_layout(geometry, Format::dense);
    int4 = make_layout(geometry, Format::int4);
    memory = static_cast<std::byte*>(
        ::mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    KVQ_ASSERT(memory != MAP_FAILED);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    auto* x = reinterpret_cast<std::uint16_t*>(memory);
    for (std::size_t i = 0; i < dense.page_bytes / 2; ++i) x[i] = float_to_half(normal(random));
    order.resize(kPoolBytes / dense.page_bytes);
    for (std::size_t i = 1; i < order.size(); ++i) std::memcpy(page(i), memory, dense.page_bytes);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
  }
  std::byte* page(std::size_t i) const { return memory + i * dense.page_bytes; }
};

Pool& pool() {
  static Pool one;
  return one;
}

template <typename Body>
void over_pages(benchmark::State& state, Body body) {
  Pool& p = pool();
  std::size_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(body(p.page(p.order[at])));
    at = (at + 1) % p.order.size();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(p.dense.page_bytes));
}

void read_page(benchmark::State& state) {
  over_pages(state, [](const std::byte* page) {
    std::uint64_t sum[8] = {};
    for (std::size_t b = 0; b < pool().dense.page_bytes; b += 64) {
      __builtin_prefetch(page + b + 2048);
      const auto* words = reinterpret_cast<const std::uint64_t*>(page + b);
      for (int j = 0; j < 8; ++j) sum[j] += words[j];
    }
    return std::accumulate(sum, sum + 8, std::uint64_t{0});
  });
}
BENCHMARK(read_page)->Name("checksum/read_page")->MinTime(0.5);

void sum_page(benchmark::State& state) {
  over_pages(state, [](const std::byte* page) { return page_checksum(page, pool().dense.page_bytes); });
}
BENCHMARK(sum_page)->Name("checksum/xxh3_page")->MinTime(0.5);

// What the device does for one page that turns int4, without and with its checks: of the source before, of what was
// written after.
void to_int4(benchmark::State& state, bool checked) {
  std::vector<std::byte> out(pool().int4.page_bytes);
  over_pages(state, [&](const std::byte* page) {
    std::uint64_t sum = checked ? page_checksum(page, pool().dense.page_bytes) : 0;
    KVQ_ASSERT(transcode_page(pool().geometry, pool().dense, page, pool().int4, out.data()));
    if (checked) sum ^= page_checksum(out.data(), out.size());
    return sum;
  });
}
BENCHMARK_CAPTURE(to_int4, unchecked, false)->Name("checksum/to_int4_unchecked")->MinTime(0.5);
BENCHMARK_CAPTURE(to_int4, checked, true)->Name("checksum/to_int4_checked")->MinTime(0.5);

}  // namespace
}  // namespace kvq::testing
