// The daemon's side of hot paths: publish, fill a magazine, seal and release, a tick over 100K pages, and what the
// store pays for each kind of command.
#include <benchmark/benchmark.h>

#include "daemon/shm/directory_writer.h"
#include "tests/bench/bare_node.h"
#include "tests/bench/samples.h"

namespace kvq::testing {
namespace {

DirectoryWriter directory() {
  return std::move(*DirectoryWriter::create(
      {.tenant = TenantId{1}, .capacity = 65536, .arena_bytes = 1 << 30, .slab_bytes = 1 << 20, .prefix_buckets = 64}));
}

void directory_publish(benchmark::State& state) {
  DirectoryWriter writer = directory();
  std::uint32_t i = 0;
  for (auto _ : state) {
    const PageId page{1 + (i++ & 0x7fff)};
    writer.publish(page, {1, Format::dense, EntryState::open, std::uint64_t{i & 0xffff} * kOffsetUnitBytes});
  }
}
BENCHMARK(directory_publish);

void epoch_advance(benchmark::State& state) {
  DirectoryWriter writer = directory();
  for (auto _ : state) writer.advance_epoch();
}
BENCHMARK(epoch_advance);

// 64 pages: into the magazine, bound to a sequence, sealed, released, reaped. Per page, with the tick's share.
void page_life(benchmark::State& state) {
  Node node(16, 4096);
  for (auto _ : state) {
    if (!node.want(64)) return state.SkipWithError("no room");
    node.send_sequence(1, 64, 0);
    node.send_release(1);
    node.store->tick(++node.now_ms);
  }
  state.SetItemsProcessed(state.iterations() * 64);
}
BENCHMARK(page_life)->Unit(benchmark::kMicrosecond);

// The same with a key each: into the prefix table and, as the cache fills, out of it again.
void page_life_indexed(benchmark::State& state) {
  Node node(16, 4096);
  std::uint32_t content = 1;
  for (auto _ : state) {
    if (!node.want(64)) return state.SkipWithError("no room");
    node.send_sequence(1, 64, content++);
    node.send_release(1);
    node.store->tick(++node.now_ms);
  }
  state.SetItemsProcessed(state.iterations() * 64);
}
BENCHMARK(page_life_indexed)->Unit(benchmark::kMicrosecond);

// What one command costs the store, of 64 of its kind in one drain: its checks, its change and its journal. `credit` is
// a page of the tick that gives 64; `settle` a page of the tick after 64 seals, which names and publishes them;
// `release` a page of a sequence of 64. The median over many rounds, since the machine may be shared.
enum class Part { credit, take, seal, settle, commit, release };

void command(benchmark::State& state, Part timed) {
  constexpr std::uint32_t kPages = 64;
  constexpr int kRounds = 20'000;
  for (auto _ : state) {
    Node node(16, 4096);
    Samples samples;
    for (int round = 1; round <= kRounds; ++round) {
      double us = 0;
      const auto part = [&](Part part, const auto& body) {
        const auto began = Clock::now();
        body();
        if (part == timed) us += us_since(began);
      };
      const auto drain = [&] { node.store->drain_commands(node.client->id, node.now_ms); };
      const auto tick = [&] { node.store->tick(++node.now_ms); };
      bool given = false;
      for (int i = 0; i < 20 && !given; ++i) {
        part(Part::credit, [&] { given = static_cast<bool>(node.store->request_credits(node.client->id, kPages)); });
        if (!given) part(Part::credit, tick);
      }
      if (!given) return state.SkipWithError("no room");
      const std::vector<Command> seals = node.send_takes(1, kPages, static_cast<std::uint32_t>(round));
      part(Part::take, drain);
      for (const Command& c : seals) node.client->send(c);
      part(Part::seal, drain);
      part(Part::settle, tick);
      for (std::uint32_t i = 0; i < kPages; ++i) node.send_commit(1, kPages * kPageTokens);
      part(Part::commit, drain);
      node.send_release(1);
      part(Part::release, drain);
      tick();
      samples.add(us / kPages);
    }
    samples.report(state);
  }
}
#define KVQ_COMMAND(part) \
  BENCHMARK_CAPTURE(command, part, Part::part)->Iterations(1)->UseManualTime()->Unit(benchmark::kNanosecond)
KVQ_COMMAND(credit);
KVQ_COMMAND(take);
KVQ_COMMAND(seal);
KVQ_COMMAND(settle);
KVQ_COMMAND(commit);
KVQ_COMMAND(release);

// 100K sealed pages in 100 sequences, of which 90 are idle. Arg 0: calm. Arg 1: each tick plans and starts 64
// transcodes and publishes those of the tick before.
void tick_at_100k_pages(benchmark::State& state) {
  constexpr std::uint32_t kPages = 100'000, kSequence = 1000;
  Node node(440, kPages + 8192);
  for (std::uint32_t sequence = 1; sequence <= kPages / kSequence; ++sequence) {
    if (!node.want(kSequence)) return state.SkipWithError("no room");
    node.send_sequence(sequence, kSequence, sequence);
    if (sequence % 10 != 0) node.send_release(sequence);
    node.store->tick(++node.now_ms);
  }
  if (state.range(0) != 0 &&
      !node.store->set_watermarks({.quantize_at = 0.3, .evict_at = 0.98, .refuse_at = 1.0, .relief = 0.01})) {
    return state.SkipWithError("watermarks refused");
  }
  std::uint64_t submitted = 0;
  for (auto _ : state) submitted += node.store->tick(++node.now_ms).submitted;
  state.counters["sealed_pages"] = static_cast<double>(node.store->status().tenants[0].sealed_pages);
  state.counters["transcodes_per_tick"] = static_cast<double>(submitted) / static_cast<double>(state.iterations());
}
BENCHMARK(tick_at_100k_pages)->Arg(0)->Arg(1)->Unit(benchmark::kMicrosecond)->Iterations(500);

}  // namespace
}  // namespace kvq::testing
