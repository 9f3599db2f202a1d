// Memory sites: every fence and every ordered access that the protocol between kvqd and its clients relies on, by name.
//
// Invariant: the protocol is written once (step_protocol.h, ring_protocol.h, prefix_table.h) over a memory policy. Programs
// use SharedMemory, in which a site is documentation and leaves no code; tests/epochs runs the same code on a model of weak
// memory, turns each site off, and must find what then goes wrong. docs/epochs.md has the argument.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvq {

enum class Site : std::uint8_t {
  plain,  // no order is asked for here
  // Fences, seq_cst. Each is one half of a store-load pair: of two sides that store, fence and load, one sees the other.
  begin_step,     // between `begun` and what the step reads: pairs with the two below
  advance_epoch,  // between what was published and the scan of the step slots
  revoke,         // between `revoked` and the scan of the step slots
  // Releases and the acquires that pair with them.
  epoch_advanced,   // with begin_step as the acquire: a step of a later epoch sees the entries of the earlier ones
  step_reopened,    // with epoch_scanned: a slot's next step says that the reads of its last one are over
  epoch_scanned,
  step_ended,       // with end_scanned: the reads and writes of a step are over
  end_scanned,
  end_seen,         // likewise, for the session itself where another side ends its steps, as a GPU does
  step_begun,       // with begun_scanned: the epoch that the scan finds is not that of an earlier step. Not needed for safety,
  begun_scanned,    // since an older epoch only holds slots longer
  entry_published,  // with entry_loaded: an entry comes after the bytes that it names
  entry_loaded,
  item_produced,    // with produced_seen: a ring's index comes after its item
  produced_seen,
  item_consumed,    // with consumed_seen: an item is copied out before its place is given back
  consumed_seen,
  bucket_cleared,   // fence, with bucket_checked: a tag is never seen under the value that stood there before it
  bucket_checked,   // fence
  bucket_named,     // with bucket_seen: a value comes after its tag
  bucket_seen,
};

// Memory as programs have it.
struct SharedMemory {
  template <typename T>
  static T load(const std::atomic<T>& word, std::memory_order order, Site) {
    return word.load(order);
  }
  template <typename T>
  static void store(std::atomic<T>& word, std::type_identity_t<T> value, std::memory_order order, Site) {
    word.store(value, order);
  }
  static void fence(std::memory_order order, Site) { std::atomic_thread_fence(order); }

  // Bytes that one side owns at a time. What was copied out is never read again from memory that the other side may write:
  // the compiler could do that without the signal fence.
  template <typename T>
  static void write(T& shared, const T& value) {
    shared = value;
  }
  template <typename T>
  static T read(const T& shared) {
    T copy;
    std::memcpy(static_cast<void*>(&copy), &shared, sizeof copy);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    return copy;
  }
};

}  // namespace kvq
