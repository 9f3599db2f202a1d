// The ring protocol: one producer, one consumer, in two processes (kvq/segment.h, Ring).
//
// Invariant: the producer stores the item and then `produced`; the consumer copies the item out and then stores `consumed`.
// Each side keeps its own copy of the word that it writes, and believes the other's word only within the ring's size.
#pragma once

#include <iterator>

#include "kvq/memory_site.h"

namespace kvq {

// The two words as the other side sees them. The daemon shows its own only once what they stand for is committed.
template <typename Memory, typename Ring>
void show_produced(Ring& ring, std::uint64_t produced) {
  Memory::store(ring.produced, produced, std::memory_order_release, Site::item_produced);
}
template <typename Memory, typename Ring>
void show_consumed(Ring& ring, std::uint64_t consumed) {
  Memory::store(ring.consumed, consumed, std::memory_order_release, Site::item_consumed);
}

// Precondition of both: the ring has room, as ring_consumed() said. What is written is not seen before show_produced().
template <typename Memory, typename Ring, typename Item>
void ring_write(Ring& ring, std::uint64_t produced, const Item& item) {
  Memory::write(ring.item[produced % std::size(ring.item)], item);
}
template <typename Memory, typename Ring, typename Item>
void ring_push(Ring& ring, std::uint64_t& produced, const Item& item) {
  ring_write<Memory>(ring, produced, item);
  show_produced<Memory>(ring, ++produced);
}

// Precondition of both: an item is there, as ring_produced() said. Until ring_advance() the producer leaves it as it is.
template <typename Memory, typename Ring>
auto ring_copy(const Ring& ring, std::uint64_t consumed) {
  return Memory::read(ring.item[consumed % std::size(ring.item)]);
}
template <typename Memory, typename Ring>
void ring_advance(Ring& ring, std::uint64_t& consumed) {
  show_consumed<Memory>(ring, ++consumed);
}

template <typename Memory, typename Ring>
auto ring_pop(Ring& ring, std::uint64_t& consumed) {
  auto copy = ring_copy<Memory>(ring, consumed);
  ring_advance<Memory>(ring, consumed);
  return copy;
}

template <typename Memory, typename Ring>
std::uint64_t ring_produced(const Ring& ring) {
  return Memory::load(ring.produced, std::memory_order_acquire, Site::produced_seen);
}

template <typename Memory, typename Ring>
std::uint64_t ring_consumed(const Ring& ring) {
  return Memory::load(ring.consumed, std::memory_order_acquire, Site::consumed_seen);
}

}  // namespace kvq
