// The undo journal: the old bytes of every durable record that the running transaction has changed.
//
// Invariant: a record's old bytes are in the journal before the record changes, and commit() empties it with one store.
// So whatever instruction the process dies at, undo() gives back the state of the last commit. What a dying process
// stored is a prefix of its stores in program order: only the compiler has to be kept from reordering them, hence the
// signal fences. (Undo logging as in IBM's ARIES and Intel's PMDK, here against process death only.)
//
//   word 0: words in use | entries: region << 32 | bytes, offset, old bytes rounded up to 8
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvq/result.h"

namespace kvq {

class Journal {
 public:
  // `words`: all zero, or an earlier process's (then undo() comes first). They outlive the journal.
  explicit Journal(std::span<std::uint64_t> words) : words_(words) {}

  bool empty() const { return words_[0] == 0; }
  std::uint64_t used_bytes() const { return words_[0] * 8; }

  // Remembers `bytes` bytes at `at`, which lies `offset_bytes` into region `region`.
  void save(std::uint32_t region, std::uint64_t offset_bytes, const void* at, std::uint32_t bytes) {
    const std::uint64_t head = (std::uint64_t{region} << 32) | bytes, used = words_[0];
    // Most often the record that was saved last is changed again.
    if (used != 0 && words_[last_] == head && words_[last_ + 1] == offset_bytes) return;
    const std::uint64_t need = 2 + (bytes + 7) / 8;
    KVQ_ASSERT(1 + used + need <= words_.size());  // transactions are cut into pieces that fit
    last_ = 1 + used;
    words_[last_] = head;
    words_[last_ + 1] = offset_bytes;
    std::memcpy(&words_[last_ + 2], at, bytes);
    fence();
    words_[0] = used + need;
    fence();
  }

  void commit() {
    fence();
    words_[0] = 0;
    fence();
  }

  // Puts the old bytes back, newest first, and empties the journal. `find(region)` gives a region's memory. False: the
  // journal is damaged, and nothing was changed. Doing it twice, or half and then all of it, comes to the same.
  template <typename Find>
  bool undo(Find find) {
    std::vector<std::uint64_t> entries;
    const std::uint64_t used = words_[0];
    if (used >= words_.size()) return false;
    for (std::uint64_t i = 1; i <= used;) {
      if (used + 1 - i < 2) return false;
      const std::uint64_t bytes = words_[i] & 0xffff'ffff, need = 2 + (bytes + 7) / 8;
      if (need > used + 1 - i) return false;
      const std::span<std::byte> region = find(static_cast<std::uint32_t>(words_[i] >> 32));
      if (words_[i + 1] > region.size() || bytes > region.size() - words_[i + 1]) return false;
      entries.push_back(i);
      i += need;
    }
    for (auto e = entries.rbegin(); e != entries.rend(); ++e) {
      const std::span<std::byte> region = find(static_cast<std::uint32_t>(words_[*e] >> 32));
      std::memcpy(region.data() + words_[*e + 1], &words_[*e + 2], words_[*e] & 0xffff'ffff);
    }
    commit();
    return true;
  }

 private:
  static void fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

  std::span<std::uint64_t> words_;
  std::uint64_t last_ = 0;  // place of the newest entry; meaningful while not empty
};

// Records that a journal guards. Without a journal (tests of one table) saving does nothing.
struct JournalRegion {
  Journal* journal = nullptr;
  std::uint32_t region = 0;
  const std::byte* base = nullptr;

  template <typename T>
  void save(const T& record) const {
    save(&record, sizeof(T));
  }
  void save(const void* at, std::size_t bytes) const {
    if (journal == nullptr) return;
    const auto offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(at) - base);
    journal->save(region, offset, at, static_cast<std::uint32_t>(bytes));
  }
};

}  // namespace kvq
