// Directory entries in device memory: every way writes the words it was given, after what was in the stream before.
#include "kernels/cuda/entries.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "tests/kernels/kernel_fixture.h"

namespace kvq {
namespace {

constexpr std::uint32_t kCapacity = 5000;
using cuda::EntryPath;
using cuda::EntryWrite;

class GpuEntries : public testing::TestWithParam<EntryPath> {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&entries_), kCapacity * 8), cudaSuccess);
    ASSERT_EQ(cudaMemset(entries_, 0xa5, kCapacity * 8), cudaSuccess);
  }
  void TearDown() override {
    cudaFree(entries_);
    cudaStreamDestroy(stream_);
  }
  std::vector<std::uint64_t> read() {
    std::vector<std::uint64_t> words(kCapacity);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(words.data(), entries_, kCapacity * 8, cudaMemcpyDeviceToHost), cudaSuccess);
    return words;
  }

  cudaStream_t stream_ = nullptr;
  std::uint64_t* entries_ = nullptr;
};

TEST_P(GpuEntries, WritesTheWordsThatItWasGivenAndNoOther) {
  std::mt19937_64 random(test_seed());
  std::vector<std::uint64_t> expected(kCapacity, 0xa5a5'a5a5'a5a5'a5a5);
  for (const std::size_t count : {0u, 1u, 2u, 16u, 255u, 256u, 1000u, 4096u}) {
    std::vector<std::uint32_t> places(kCapacity);
    std::iota(places.begin(), places.end(), 0);
    if (GetParam() != EntryPath::copy) std::shuffle(places.begin(), places.end(), random);
    const std::uint32_t first = GetParam() == EntryPath::copy ? random() % (kCapacity - count) : 0;
    std::vector<EntryWrite> writes;
    for (std::size_t i = 0; i < count; ++i) writes.push_back({places[first + i], random()});
    for (const EntryWrite& write : writes) expected[write.index] = write.word;
    ASSERT_TRUE(cuda::write_entries(entries_, writes, stream_, GetParam()));
    ASSERT_EQ(read(), expected) << count << " entries";
  }
}

TEST_P(GpuEntries, WritesAfterWhatTheStreamDidBefore) {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  std::byte *data = nullptr, *seen = nullptr;
  std::uint64_t* words = nullptr;  // in host memory, so that the host can watch
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), kBytes), cudaSuccess);
  ASSERT_EQ(cudaMemset(data, 7, kBytes), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&seen), kBytes), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&words), 64), cudaSuccess);
  std::atomic_ref<std::uint64_t> word(words[3]);
  for (int round = 0; round < 10 && GetParam() != EntryPath::copy; ++round) {
    word.store(0);
    std::fill_n(seen, kBytes, std::byte{0});
    ASSERT_EQ(cudaMemcpyAsync(seen, data, kBytes, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
    const EntryWrite write{3, 0x1234'5678'9abc'def0};
    ASSERT_TRUE(cuda::write_entries(words, {&write, 1}, stream_, GetParam()));
    while (word.load() == 0) {
    }
    EXPECT_EQ(word.load(), write.word);
    EXPECT_EQ(seen[kBytes - 1], std::byte{7});
  }
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  cudaFreeHost(words);
  cudaFreeHost(seen);
  cudaFree(data);
}

TEST_P(GpuEntries, RefusesToCopyEntriesWithGaps) {
  const EntryWrite writes[] = {{1, 1}, {3, 3}};
  const Result<void> done = cuda::write_entries(entries_, writes, stream_, GetParam());
  EXPECT_EQ(done.error().code, GetParam() == EntryPath::copy ? Errc::invalid_argument : Errc::ok);
  EXPECT_EQ(read()[3], GetParam() == EntryPath::copy ? 0xa5a5'a5a5'a5a5'a5a5 : 3u);
}

INSTANTIATE_TEST_SUITE_P(, GpuEntries,
                         testing::Values(EntryPath::automatic, EntryPath::memory_operations, EntryPath::kernel,
                                         EntryPath::copy));

}  // namespace
}  // namespace kvq
