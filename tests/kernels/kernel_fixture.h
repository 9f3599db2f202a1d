// What the kernel tests share: seeds, vector targets, and a small pool of pages in any formats.
//
// Invariant: every random test draws from one engine whose seed is printed and can be given back as KVQ_TEST_SEED.
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "kernels/half.h"
#include "kernels/host_kernels.h"
#include "kernels/oracle.h"

namespace kvq {

inline std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("KVQ_TEST_SEED");
    const std::uint64_t value = given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device()();
    std::printf("KVQ_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

inline std::vector<std::int64_t> vector_targets() {
  std::vector<std::int64_t> targets;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (target != HWY_SCALAR) targets.push_back(target);
  }
  return targets;
}

// Makes dispatch choose `target` while it lives.
class WithTarget {
 public:
  explicit WithTarget(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~WithTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  WithTarget(const WithTarget&) = delete;
};

inline constexpr std::uint32_t kHeadDims[] = {64, 80, 96, 128, 192, 256};
inline constexpr Format kFormats[] = {Format::dense, Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4};

inline std::uint32_t index_of(Format f) { return static_cast<std::uint32_t>(f); }

inline std::uint16_t encode(float x, Dtype dtype) { return dtype == Dtype::fp16 ? float_to_half(x) : float_to_bf16(x); }

// A block-aligned buffer for page bytes.
struct Bytes {
  explicit Bytes(std::size_t size, int fill = 0xcd)
      : size(size), data(static_cast<std::byte*>(std::aligned_alloc(256, (size + 255) / 256 * 256))) {
    std::fill_n(data, size, static_cast<std::byte>(fill));
  }
  ~Bytes() { std::free(data); }
  Bytes(const Bytes&) = delete;
  std::size_t size;
  std::byte* data;
  std::uint16_t* halves() { return reinterpret_cast<std::uint16_t*>(data); }
};

// A directory of a few pages over a sparse arena, written as the daemon would.
class PagePool {
 public:
  PagePool(const ModelGeometry& geometry, std::uint32_t capacity, std::uint64_t arena_bytes)
      : geometry_(geometry),
        layouts_(kFormatCount),
        entries_(new DirectoryEntry[capacity]),
        capacity_(capacity),
        arena_bytes_(arena_bytes) {
    for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts_[f] = make_layout(geometry, static_cast<Format>(f));
    for (std::uint32_t i = 0; i < capacity; ++i) entries_[i] = pack_entry({0, Format::none, EntryState::free, 0});
    entries_[0] = pack_entry({0, Format::none, EntryState::null, 0});
    void* p = mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) std::abort();
    arena_ = static_cast<std::byte*>(p);
  }
  ~PagePool() { munmap(arena_, arena_bytes_); }
  PagePool(const PagePool&) = delete;

  // Gives page `id` the next free place (or `offset`), in `format` and `state`.
  std::byte* place(std::uint32_t id, Format format, EntryState state, std::uint64_t offset = ~std::uint64_t{0}) {
    if (offset == ~std::uint64_t{0}) {
      offset = next_;
      next_ += layouts_[index_of(format)].page_bytes;
    }
    entries_[id] = pack_entry({1, format, state, offset});
    return arena_ + offset;
  }

  // Fills `id` with normal values (each channel with its own bias and spread), in `format`.
  void fill(std::uint32_t id, Format format, std::mt19937_64& random, std::uint64_t offset = ~std::uint64_t{0}) {
    const PageLayout& dense = layouts_[index_of(Format::dense)];
    Bytes page(dense.page_bytes, 0);
    std::normal_distribution<float> normal;
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      const LayerSpec& spec = geometry_.layer[layer];
      const std::uint32_t d = spec.head_dim;
      for (std::uint32_t head = 0; head < spec.kv_heads; ++head) {
        const LayerPlace& at = dense.layer[layer];
        auto* block = reinterpret_cast<std::uint16_t*>(page.data + at.offset_bytes + head * at.head_bytes);
        for (std::uint32_t c = 0; c < d; ++c) {
          const float bias = 2 * normal(random), spread = c % 17 == 0 ? 3.0f : 1.0f;
          for (std::uint32_t t = 0; t < kPageTokens; ++t) {
            block[dense_index(t, c, d)] = encode(bias + spread * normal(random), spec.dtype);
            block[kPageTokens * d + dense_index(t, c, d)] = encode(normal(random), spec.dtype);
          }
        }
      }
    }
    std::byte* out = place(id, format, EntryState::sealed, offset);
    const Result<void> done = transcode_page(geometry_, dense, page.data, layouts_[index_of(format)], out);
    if (!done) std::abort();
  }

  ModelView model() const { return {&geometry_, layouts_.data()}; }
  PageSource source() const { return {entries_.get(), capacity_, arena_}; }
  std::uint64_t arena_bytes() const { return arena_bytes_; }
  const PageLayout& layout(Format f) const { return layouts_[index_of(f)]; }
  DirectoryEntry& entry(std::uint32_t id) { return entries_[id]; }

 private:
  ModelGeometry geometry_;
  std::vector<PageLayout> layouts_;
  std::unique_ptr<DirectoryEntry[]> entries_;
  std::uint32_t capacity_;
  std::uint64_t arena_bytes_;
  std::byte* arena_ = nullptr;
  std::uint64_t next_ = 0;
};

inline ModelGeometry one_layer(std::uint16_t kv_heads, std::uint32_t d, Dtype dtype) {
  ModelGeometry g;
  g.layers = 1;
  g.layer[0] = {kv_heads, static_cast<std::uint16_t>(d), dtype, 0};
  return g;
}

}  // namespace kvq
