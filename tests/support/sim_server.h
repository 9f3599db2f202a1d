// What a model server does with pages, in short calls: grow sequences, seal their pages, share them.
#pragma once

#include "tests/support/store_node.h"

namespace kvq::testing {

// Keys of a chain of pages: `content` tells chains apart, the value of a page follows from its key.
inline Key chain_key(std::uint32_t content, std::uint32_t index) {
  Key key{};
  std::uint64_t x = (std::uint64_t{content} << 32) + index + 1;
  for (std::size_t i = 0; i < key.size(); ++i) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL + 2 * i;
    key[i] = static_cast<std::uint8_t>(x >> 56);
  }
  return key;
}
inline std::uint16_t value_of(const Key& key) {  // a positive, normal fp16
  return static_cast<std::uint16_t>(0x0400 + ((key[0] << 8 | key[1]) % 0x7000));
}

struct SimServer {
  StoreNode& node;
  SimClient& client;

  Command command(CommandKind kind, std::uint32_t sequence) const {
    Command c{};
    c.kind = kind;
    c.sequence = SequenceId{sequence};
    return c;
  }
  void send(Command c) { ASSERT_TRUE(client.send(c)); }
  void open(std::uint32_t sequence, std::uint16_t flags = 0) {
    Command c = command(CommandKind::open, sequence);
    c.flags = flags;
    send(c);
  }
  // Asks until the magazine has `pages`, at most `tries` ticks.
  bool want(std::uint32_t pages, int tries = 40) {
    for (int i = 0; i < tries; ++i) {
      node.store->drain_commands(client.id, node.now_ms);
      if (node.store->request_credits(client.id, pages)) return true;
      node.tick();
    }
    node.store->withdraw_credits(client.id);
    return false;
  }
  // One page from the magazine becomes page `index`, and is written with the value of `key`.
  MagazineItem take(std::uint32_t sequence, std::uint32_t index, const Key& key) {
    const std::optional<MagazineItem> item = client.pop();
    EXPECT_TRUE(item.has_value());
    if (!item) return {};
    client.write(item->page, value_of(key));
    Command c = command(CommandKind::take, sequence);
    c.page = item->page;
    c.generation = item->generation;
    c.index = index;
    send(c);
    return *item;
  }
  void seal(std::uint32_t sequence, std::uint32_t index, const MagazineItem& item, const Key& key,
            std::uint64_t serial = 0, std::uint16_t flags = 0) {
    Command c = command(CommandKind::seal, sequence);
    c.page = item.page;
    c.generation = item.generation;
    c.index = index;
    c.serial = serial;
    c.flags = flags;
    std::memcpy(c.key, key.data(), key.size());
    send(c);
  }
  // A sequence of `pages` sealed pages of chain `content`. Empty: no room. `flags` of the sequence, of each page's
  // seal.
  std::vector<PageId> grow(std::uint32_t sequence, std::uint32_t content, std::uint32_t pages, std::uint16_t flags = 0,
                           std::uint16_t seal_flags = 0) {
    if (!want(pages)) return {};
    open(sequence, flags);
    std::vector<PageId> out;
    for (std::uint32_t i = 0; i < pages; ++i) {
      const Key key = chain_key(content, i);
      const MagazineItem item = take(sequence, i, key);
      seal(sequence, i, item, key, 0, seal_flags);
      out.push_back(item.page);
    }
    drain();
    return out;
  }
  void drain() { node.store->drain_commands(client.id, node.now_ms); }
  void act(CommandKind kind, std::uint32_t sequence, std::uint32_t index = 0, std::uint32_t argument = 0) {
    Command c = command(kind, sequence);
    c.index = index;
    c.argument = argument;
    send(c);
    drain();
  }
  void release(std::uint32_t sequence) { act(CommandKind::release, sequence); }
  void park(std::uint32_t sequence) { act(CommandKind::park, sequence); }

  // Attaches the first `pages` pages of a chain by its prefix table entry.
  Result<std::vector<PageId>> attach(std::uint32_t sequence, std::uint32_t content, std::uint32_t pages,
                                     bool floor_dense = false) {
    drain();
    const Key key = chain_key(content, pages - 1);
    const PrefixHit hit = client.find(key);
    return node.store->attach(client.id, SequenceId{sequence}, hit.page, hit.generation, pages, key, floor_dense,
                              node.now_ms);
  }
};

}  // namespace kvq::testing
