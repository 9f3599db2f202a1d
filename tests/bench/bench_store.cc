// The daemon's side of hot paths: publish, fill a magazine, seal and release, and a tick over 100K pages.
#include <benchmark/benchmark.h>

#include <bit>
#include <cstring>

#include "daemon/shm/directory_writer.h"
#include "tests/support/sim_client.h"

namespace kvq::testing {
namespace {

constexpr std::uint64_t kSlabBytes = 4 << 20;  // 256 dense pages of 16 KiB: about as many slabs as 100 GB of real ones

// A device without memory: the store's own work is what is measured.
class NoMemory final : public Device {
 public:
  explicit NoMemory(std::uint32_t slabs) : arena_bytes_(slabs * kSlabBytes) {}
  std::string name() const override { return "none"; }
  std::uint64_t arena_bytes() const override { return arena_bytes_; }
  std::uint64_t slab_bytes() const override { return kSlabBytes; }
  Result<void> create_slab(SlabId) override { return {}; }
  void destroy_slab(SlabId) override {}
  int descriptor(SlabId, bool) const override { return -1; }
  void submit(std::span<const TranscodeJob> jobs) override {
    for (const TranscodeJob& job : jobs) done_.push_back({job.id, {}});
  }
  void poll(std::vector<TranscodeDone>& done) override {
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
  }
  std::size_t in_flight() const override { return done_.size(); }

 private:
  std::uint64_t arena_bytes_;
  std::vector<TranscodeDone> done_;
};

struct Node {
  Node(std::uint32_t slabs, std::uint32_t pages) : device(slabs) {
    StoreConfig config;
    config.max_pages = pages;
    config.actions_per_tick = 64;
    config.watermarks = {.quantize_at = 0.97, .evict_at = 0.98, .refuse_at = 1.0, .relief = 0.01};
    store = Store::create(config, device, nullptr, nullptr);
    SessionRequest request;
    request.tenant = store->add_tenant({.name = "bench"});
    request.geometry.layers = 1;
    request.geometry.layer[0] = {1, 64, Dtype::fp16, 0};
    request.maps_slabs = false;
    client = std::make_unique<SimClient>(*store, request.tenant, request.geometry, kSlabBytes,
                                         std::bit_ceil(std::uint64_t{pages} * 2), pages);
    client->connect(*store->open_session(request, 0));
  }

  bool want(std::uint32_t pages) {
    for (int i = 0; i < 20; ++i) {
      store->drain_commands(client->id, now_ms);
      if (store->request_credits(client->id, pages)) return true;
      store->tick(++now_ms);
    }
    return false;
  }

  // Takes and seals `pages` pages from the magazine into a new sequence. `content` 0: private pages.
  void send_sequence(std::uint32_t sequence, std::uint32_t pages, std::uint32_t content) {
    Command c{};
    c.kind = CommandKind::open;
    c.sequence = SequenceId{sequence};
    client->send(c);
    for (std::uint32_t i = 0; i < pages; ++i) {
      const MagazineItem item = *client->pop();
      c.kind = CommandKind::take;
      c.page = item.page;
      c.generation = item.generation;
      c.index = i;
      client->send(c);
      c.kind = CommandKind::seal;
      c.flags = content == 0 ? kPrivate : 0;
      for (std::size_t b = 0; b < sizeof c.key; b += 8) {
        std::uint64_t word = ((std::uint64_t{content} << 32) + i + 1 + b) * 0x9e3779b97f4a7c15ULL;
        word = (word ^ (word >> 31)) * 0xbf58476d1ce4e5b9ULL;
        word ^= word >> 29;
        std::memcpy(c.key + b, &word, 8);
      }
      client->send(c);
    }
  }
  void send_release(std::uint32_t sequence) {
    Command c{};
    c.kind = CommandKind::release;
    c.sequence = SequenceId{sequence};
    client->send(c);
  }

  NoMemory device;
  std::unique_ptr<Store> store;
  std::unique_ptr<SimClient> client;
  std::uint64_t now_ms = 1;
};

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
