// The backend of the test process itself, and slabs in its arena.
#pragma once

#include <gtest/gtest.h>

#include <thread>

#include "tests/gpu/gpu_test.h"

namespace kvq::test {

inline constexpr std::uint64_t kSlabBytes = 64ull << 20;
inline constexpr std::uint32_t kSlabs = 64;

// Made on the first call, and never destroyed: the context is the runtime's too.
inline gpu::Backend& backend() {
  static gpu::Backend* one = [] {
    gpu::Backend* made = open_backend().release();
    (void)KVQ_MUST(made->reserve(kSlabBytes, kSlabs));
    return made;
  }();
  return *one;
}

inline std::uint64_t& last_sequence() {
  static std::uint64_t last = 0;
  return last;
}

inline void wait_written(std::uint64_t sequence) {
  const double end = now_ms() + 10'000;
  while (backend().written() < sequence) {
    if (now_ms() > end) FAIL() << "written stays at " << backend().written() << ", not " << sequence;
    std::this_thread::yield();
  }
}

// A new slab in its place, seen through a window of its own; given back with the object.
struct Placed {
  explicit Placed(std::uint32_t slab)
      : slab(slab),
        memory(std::move(*KVQ_MUST(backend().make_slab()))),
        window(memory.exported.get(), kSlabBytes, cuda::Access::read_write) {
    (void)KVQ_MUST(backend().place_slab(SlabId{slab}, memory.serial));
  }
  ~Placed() { backend().release_slab(SlabId{slab}); }
  const std::uint32_t slab;
  gpu::NewMemory memory;
  Imported window;
};

inline void drop_spare(std::uint64_t serial) {
  (void)KVQ_MUST(backend().place_slab(SlabId{kSlabs - 1}, serial));
  backend().release_slab(SlabId{kSlabs - 1});
}

}  // namespace kvq::test
