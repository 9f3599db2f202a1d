// Pages in device memory for the transcoder's tests, with what surrounds them watched.
//
// Invariant: a slot that nothing has written is poison, and so is the gap behind each slot; bytes come back by plain
// copies.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/cuda/cuda_transcode.h"
#include "kernels/page_sum.h"
#include "tests/kernels/kernel_fixture.h"

namespace kvq {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

using Content = std::vector<std::byte>;

// `count` slots of one size in device memory, a gap behind each.
class Slots {
 public:
  Slots(std::size_t count, std::uint64_t page_bytes)
      : page_bytes_(page_bytes), poison_(count * (page_bytes + kGap), std::byte{0xa5}) {
    KVQ_ASSERT(cudaMalloc(reinterpret_cast<void**>(&memory_), poison_.size()) == cudaSuccess);
    KVQ_ASSERT(cudaMemset(memory_, 0xa5, poison_.size()) == cudaSuccess);
  }
  ~Slots() { cudaFree(memory_); }
  Slots(const Slots&) = delete;

  std::byte* at(std::size_t i) { return memory_ + i * (page_bytes_ + kGap); }
  void put(std::size_t i, const Content& page) {
    KVQ_ASSERT(page.size() == page_bytes_ &&
               cudaMemcpy(at(i), page.data(), page_bytes_, cudaMemcpyHostToDevice) == cudaSuccess);
  }
  Content get(std::size_t i) {
    Content page(page_bytes_);
    KVQ_ASSERT(cudaMemcpy(page.data(), at(i), page_bytes_, cudaMemcpyDeviceToHost) == cudaSuccess);
    return page;
  }
  bool gaps_intact() {
    Content all(poison_.size());
    KVQ_ASSERT(cudaMemcpy(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    for (std::size_t end = page_bytes_; end < all.size(); end += page_bytes_ + kGap) {
      if (std::memcmp(all.data() + end, poison_.data(), kGap) != 0) return false;
    }
    return true;
  }

 private:
  static constexpr std::uint64_t kGap = 256;
  std::uint64_t page_bytes_;
  Content poison_;
  std::byte* memory_ = nullptr;
};

enum class Fill { normal, constants, one_sided, offset, subnormal, extremes, steps, exponents };
inline constexpr Fill kFills[] = {Fill::normal,    Fill::constants, Fill::one_sided, Fill::offset,
                                  Fill::subnormal, Fill::extremes,  Fill::steps,     Fill::exponents};

// Element values of one channel: keys have a bias per channel, some channels are outliers.
class Channel {
 public:
  Channel(Fill fill, std::uint32_t number, std::mt19937_64& random)
      : fill_(fill),
        number_(number),
        random_(random),
        bias_(3 * normal_(random)),
        spread_(number % 17 == 3 ? 20.0f : 1.0f) {
    exponent_ = static_cast<int>(random() % 34) - 20;
  }

  float draw() {
    switch (fill_) {
      case Fill::normal:
        return bias_ + spread_ * normal_(random_);
      case Fill::constants:
        return number_ % 3 == 0 ? (random_() % 2 != 0 ? 0.0f : -0.0f) : static_cast<float>(number_) * 0.37f;
      case Fill::one_sided:
        return std::fabs(normal_(random_)) + 2.0f;
      case Fill::offset:  // the midpoint's rounding moves codes out of range
        return 900.0f + 0.5f * normal_(random_);
      case Fill::subnormal:
        return normal_(random_) * 0x1p-22f;
      case Fill::extremes:
        return (random_() % 2 != 0 ? 1.0f : -1.0f) * (random_() % 3 == 0 ? 65280.0f : 60000.0f);
      case Fill::steps:  // many exact ties
        return static_cast<float>(static_cast<int>(random_() % 31) - 15) * 0.5f;
      case Fill::exponents:
        return std::ldexp(std::fmod(normal_(random_), 4.0f), exponent_);
    }
    return 0;
  }

 private:
  Fill fill_;
  std::uint32_t number_;
  std::mt19937_64& random_;
  std::normal_distribution<float> normal_;
  float bias_, spread_;
  int exponent_;
};

// A dense page; its padding is zero.
inline Content dense_page(const ModelGeometry& g, const PageLayout& dense, Fill fill, std::mt19937_64& random) {
  Content page(dense.page_bytes);
  for (std::uint32_t layer = 0; layer < g.layers; ++layer) {
    const std::uint32_t d = g.layer[layer].head_dim;
    for (std::uint32_t head = 0; head < g.layer[layer].kv_heads; ++head) {
      auto* block = reinterpret_cast<std::uint16_t*>(page.data() + dense.layer[layer].offset_bytes +
                                                     head * dense.layer[layer].head_bytes);
      for (std::uint32_t c = 0; c < 2 * d; ++c) {
        Channel channel(fill, c % d, random);
        for (std::uint32_t t = 0; t < kPageTokens; ++t) {
          block[c / d * kPageTokens * d + dense_index(t, c % d, d)] = encode(channel.draw(), g.layer[layer].dtype);
        }
      }
    }
  }
  return page;
}

// A mix of layers, every kind of head size and dtype, some that keep dense.
inline ModelGeometry odd_geometry(std::uint32_t layers, std::uint32_t heads, std::mt19937_64& random) {
  ModelGeometry g;
  g.layers = layers;
  for (std::uint32_t i = 0; i < layers; ++i) {
    g.layer[i] = {static_cast<std::uint16_t>(1 + random() % heads), static_cast<std::uint16_t>(kHeadDims[random() % 6]),
                  random() % 2 != 0 ? Dtype::fp16 : Dtype::bf16, static_cast<std::uint8_t>(random() % 4 == 0)};
  }
  return g;
}

inline ModelGeometry uniform(std::uint32_t layers, std::uint16_t heads, std::uint32_t d, Dtype dtype) {
  ModelGeometry g;
  g.layers = layers;
  for (std::uint32_t i = 0; i < layers; ++i) g.layer[i] = {heads, static_cast<std::uint16_t>(d), dtype, 0};
  return g;
}

inline std::uint64_t sum_of(const Content& page) { return page_sum(page.data(), page.size()); }

// What the host makes of a page; empty: refused.
inline Content host_transcode(const ModelGeometry& g, const PageLayout& from, const Content& page,
                              const PageLayout& to) {
  Bytes in(page.size()), out(to.page_bytes);
  std::memcpy(in.data, page.data(), page.size());
  if (!transcode_page(g, from, in.data, to, out.data)) return {};
  return Content(out.data, out.data + to.page_bytes);
}

// Where two pages differ first, in words of the layout.
inline std::string first_difference(const ModelGeometry& g, const PageLayout& layout, const Content& a,
                                    const Content& b) {
  std::uint64_t at = 0;
  while (at < a.size() && a[at] == b[at]) ++at;
  for (std::uint32_t i = 0; i < g.layers; ++i) {
    const LayerPlace& place = layout.layer[i];
    if (at >= place.offset_bytes + place.head_bytes * g.layer[i].kv_heads) continue;
    return "byte " + std::to_string((at - place.offset_bytes) % place.head_bytes) + " of a block of layer " +
           std::to_string(i) + ", d " + std::to_string(g.layer[i].head_dim) + ", dtype " +
           std::to_string(static_cast<int>(g.layer[i].dtype)) + ", format " +
           std::to_string(static_cast<int>(place.format));
  }
  return "padding";
}

// A transcoder on the default stream, used as the daemon's worker uses it.
class GpuTranscode : public testing::Test {
 protected:
  static constexpr std::uint32_t kMaxJobs = 1024, kBatches = 3;

  void SetUp() override {
    Result<std::unique_ptr<cuda::Transcoder>> made = cuda::Transcoder::create(kMaxJobs, kBatches, nullptr);
    ASSERT_TRUE(made) << made.error().context;
    transcoder_ = std::move(*made);
  }

  std::vector<cuda::PageJobDone> finish(std::uint32_t ticket, std::size_t jobs) {
    std::vector<cuda::PageJobDone> done(jobs);
    for (;;) {
      const Result<bool> over = transcoder_->is_done(ticket);
      if (!over)
        ADD_FAILURE() << over.error().context << ": "
                      << cudaGetErrorString(static_cast<cudaError_t>(over.error().native));
      if (!over) return done;
      if (*over) break;
    }
    transcoder_->collect(ticket, done);
    return done;
  }
  std::vector<cuda::PageJobDone> run(const ModelGeometry& g, const PageLayout& from, const PageLayout* to,
                                     const std::vector<cuda::PageJob>& jobs) {
    const Result<std::uint32_t> ticket = transcoder_->launch(g, from, to, jobs);
    if (!ticket) ADD_FAILURE() << ticket.error().context;
    return ticket ? finish(*ticket, jobs.size()) : std::vector<cuda::PageJobDone>(jobs.size());
  }

  // Rewrites `pages` and expects what the host makes of them, byte for byte. Returns the new pages.
  std::vector<Content> expect_as_host(const ModelGeometry& g, const PageLayout& from, const PageLayout& to,
                                      const std::vector<Content>& pages) {
    Slots in(pages.size(), from.page_bytes), out(pages.size(), to.page_bytes);
    std::vector<cuda::PageJob> jobs;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      in.put(i, pages[i]);
      jobs.push_back({in.at(i), out.at(i), sum_of(pages[i]), i % 2 == 0});
    }
    const std::vector<cuda::PageJobDone> done = run(g, from, &to, jobs);
    std::vector<Content> made;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      made.push_back(out.get(i));
      const Content expected = host_transcode(g, from, pages[i], to);
      EXPECT_EQ(done[i].code, Errc::ok) << "page " << i;
      EXPECT_TRUE(made[i] == expected) << "page " << i << ": " << first_difference(g, to, made[i], expected);
      EXPECT_EQ(done[i].checksum, sum_of(made[i])) << "page " << i;
      EXPECT_TRUE(in.get(i) == pages[i]) << "source " << i << " has changed";
    }
    EXPECT_TRUE(in.gaps_intact() && out.gaps_intact());
    return made;
  }

  std::unique_ptr<cuda::Transcoder> transcoder_;
};

}  // namespace kvq
