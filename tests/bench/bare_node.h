// A store alone: no memory behind its pages, one simulated client. What the benchmarks of the store's own work run on.
//
// Invariant: nothing here reads or writes a page, so what is timed is bookkeeping.
#pragma once

#include <bit>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/sim_client.h"

namespace kvq::testing {

inline constexpr std::uint64_t kSlabBytes =
    4 << 20;  // 256 dense pages of 16 KiB: about as many slabs as 100 GB of real ones

// A device without memory: the store's own work is what is measured.
class NoMemory final : public Device {
 public:
  explicit NoMemory(std::uint32_t slabs) : arena_bytes_(slabs * kSlabBytes) {}
  std::string name() const override { return "none"; }
  std::uint64_t arena_bytes() const override { return arena_bytes_; }
  std::uint64_t slab_bytes() const override { return kSlabBytes; }
  Result<void> create_slab(SlabId) override { return {}; }
  Result<void> adopt_slab(SlabId, Descriptor&, std::uint64_t) override { return {}; }
  std::uint64_t slab_serial(SlabId slab) const override { return raw(slab) + 1; }
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
  // `keeper`: what a next daemon would take over from; none for what only lives here.
  Node(std::uint32_t slabs, std::uint32_t pages, Keeper* keeper = nullptr) : device(slabs) {
    config.max_pages = pages;
    config.actions_per_tick = 64;
    config.watermarks = {.quantize_at = 0.97, .evict_at = 0.98, .refuse_at = 1.0, .relief = 0.01};
    store = Store::create(config, device, nullptr, nullptr, keeper);
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
    send_open(sequence);
    for (std::uint32_t i = 0; i < pages; ++i) client->send(seal_of(send_take(sequence, i), content));
  }
  // The same in two parts: sends open and takes, returns the seals.
  std::vector<Command> send_takes(std::uint32_t sequence, std::uint32_t pages, std::uint32_t content) {
    send_open(sequence);
    std::vector<Command> seals;
    for (std::uint32_t i = 0; i < pages; ++i) {
      Command c = send_take(sequence, i);
      seals.push_back(seal_of(c, content));
    }
    return seals;
  }
  void send_commit(std::uint32_t sequence, std::uint32_t tokens) {
    Command c{};
    c.kind = CommandKind::commit;
    c.sequence = SequenceId{sequence};
    c.index = tokens;
    client->send(c);
  }
  void send_release(std::uint32_t sequence) {
    Command c{};
    c.kind = CommandKind::release;
    c.sequence = SequenceId{sequence};
    client->send(c);
  }

  void send_open(std::uint32_t sequence) {
    Command c{};
    c.kind = CommandKind::open;
    c.sequence = SequenceId{sequence};
    client->send(c);
  }
  Command send_take(std::uint32_t sequence, std::uint32_t index) {
    const MagazineItem item = *client->pop();
    Command c{};
    c.kind = CommandKind::take;
    c.sequence = SequenceId{sequence};
    c.page = item.page;
    c.generation = item.generation;
    c.index = index;
    client->send(c);
    return c;
  }
  static Command seal_of(Command c, std::uint32_t content) {
    c.kind = CommandKind::seal;
    c.flags = content == 0 ? kPrivate : 0;
    for (std::size_t b = 0; b < sizeof c.key; b += 8) {
      std::uint64_t word = ((std::uint64_t{content} << 32) + c.index + 1 + b) * 0x9e3779b97f4a7c15ULL;
      word = (word ^ (word >> 31)) * 0xbf58476d1ce4e5b9ULL;
      word ^= word >> 29;
      std::memcpy(c.key + b, &word, 8);
    }
    return c;
  }

  StoreConfig config;
  NoMemory device;
  std::unique_ptr<Store> store;
  std::unique_ptr<SimClient> client;
  std::uint64_t now_ms = 1;
};

}  // namespace kvq::testing
