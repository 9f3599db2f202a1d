// What the device's page checksum finds, shown on damaged pages of real size.
#include "kernels/page_sum.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kernel_fixture.h"

namespace kvq {
namespace {

constexpr std::uint64_t kPageBytes = 4608 * 12 + 256;  // an int4 page of 12 blocks and some padding

struct Page : Bytes {
  explicit Page(std::mt19937_64& random) : Bytes(kPageBytes) {
    for (std::uint64_t i = 0; i < size / 4; ++i) words()[i] = static_cast<std::uint32_t>(random());
  }
  std::uint32_t* words() { return reinterpret_cast<std::uint32_t*>(data); }
  std::uint64_t sum() const { return page_sum(data, size); }
};

TEST(PageSum, AddsUpInAnyOrderAndInParts) {
  std::mt19937_64 random(test_seed());
  Page page(random);
  std::vector<std::uint32_t> order(page.size / 4);
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::uint64_t by_words = 0;
  for (const std::uint32_t i : order) add_word(by_words, i, page.words()[i]);
  EXPECT_EQ(by_words, page.sum());
  const std::uint64_t cut = random() % (page.size / 16) * 16;
  EXPECT_EQ(page_sum(page.data, cut) + page_sum(page.data, page.size - cut, cut), page.sum());
}

TEST(PageSum, HasNoMultiplierTwice) {
  std::vector<std::uint32_t> multipliers(1u << 22);  // the words of a page of 16 MiB
  for (std::uint32_t i = 0; i < multipliers.size(); ++i) {
    multipliers[i] = page_sum_multiplier(i);
    ASSERT_EQ(multipliers[i] % 2, 1u);
  }
  std::sort(multipliers.begin(), multipliers.end());
  EXPECT_EQ(std::adjacent_find(multipliers.begin(), multipliers.end()), multipliers.end());
}

TEST(PageSum, FindsEveryFlippedBit) {
  std::mt19937_64 random(test_seed() + 1);
  Page page(random);
  const std::uint64_t sound = page.sum();
  for (std::uint32_t bit = 0; bit < page.size * 8; ++bit) {
    const std::uint32_t word = page.words()[bit / 32], flipped = word ^ (1u << bit % 32);
    // The difference that the sum sees, which a full pass confirms now and then.
    std::uint64_t before = 0, after = 0;
    add_word(before, bit / 32, word);
    add_word(after, bit / 32, flipped);
    ASSERT_NE(before, after) << "bit " << bit;
    if (bit % 9973 != 0) continue;
    page.words()[bit / 32] = flipped;
    ASSERT_EQ(page.sum(), sound - before + after);
    page.words()[bit / 32] = word;
  }
}

TEST(PageSum, FindsTheSameBitFlippedInTwoWords) {
  std::mt19937_64 random(test_seed() + 2);
  Page page(random);
  const std::uint64_t sound = page.sum();
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t bit = round < 100 ? 31 : random() % 32;  // the highest bit is the weak one of most sums
    const std::uint64_t a = random() % (page.size / 4), b = random() % (page.size / 4);
    if (a == b) continue;
    page.words()[a] ^= 1u << bit;
    page.words()[b] ^= 1u << bit;
    ASSERT_NE(page.sum(), sound) << "bit " << bit << " of words " << a << " and " << b;
    page.words()[a] ^= 1u << bit;
    page.words()[b] ^= 1u << bit;
  }
}

TEST(PageSum, FindsWordsThatChangedPlaces) {
  std::mt19937_64 random(test_seed() + 3);
  Page page(random);
  const std::uint64_t sound = page.sum();
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t a = random() % (page.size / 4), b = round < 150 ? a ^ 1 : random() % (page.size / 4);
    if (page.words()[a] == page.words()[b]) continue;
    std::swap(page.words()[a], page.words()[b]);
    ASSERT_NE(page.sum(), sound) << "words " << a << " and " << b;
    std::swap(page.words()[a], page.words()[b]);
  }
}

TEST(PageSum, FindsBlocksThatAreZeroedMovedSwappedOrStale) {
  std::mt19937_64 random(test_seed() + 4);
  Page page(random), other(random);
  const std::uint64_t sound = page.sum();
  for (const std::uint64_t bytes : {32u, 128u, 256u, 4608u}) {
    const std::uint64_t blocks = kPageBytes / bytes;
    for (int round = 0; round < 40; ++round) {
      const std::uint64_t a = random() % blocks, b = (a + 1 + random() % (blocks - 1)) % blocks;
      Page damaged(random);
      const auto damage = [&](auto&& how, const char* what) {
        std::copy_n(page.data, kPageBytes, damaged.data);
        how(damaged.data + a * bytes, damaged.data + b * bytes);
        EXPECT_NE(damaged.sum(), sound) << what << ": " << bytes << " bytes, blocks " << a << " and " << b;
      };
      damage([&](std::byte* x, std::byte*) { std::fill_n(x, bytes, std::byte{0}); }, "zeroed");
      damage([&](std::byte* x, std::byte* y) { std::copy_n(x, bytes, y); }, "copied over");
      damage([&](std::byte* x, std::byte* y) { std::swap_ranges(x, x + bytes, y); }, "swapped");
      damage([&](std::byte* x, std::byte*) { std::copy_n(other.data + a * bytes, bytes, x); }, "of another page");
    }
  }
}

TEST(PageSum, FindsAPageThatSlippedAndOneOfConstantsThatChanged) {
  std::mt19937_64 random(test_seed() + 5);
  Page page(random);
  const std::uint64_t sound = page.sum();
  for (const std::uint64_t bytes : {16u, 32u, 256u}) {
    Page slipped(random);
    std::copy_n(page.data, kPageBytes, slipped.data);
    std::rotate(slipped.data, slipped.data + bytes, slipped.data + slipped.size);
    EXPECT_NE(slipped.sum(), sound) << bytes;
  }
  // Small regular differences, where sums with regular multipliers cancel out.
  std::fill_n(page.words(), kPageBytes / 4, 0x3c003c00u);
  const std::uint64_t constant = page.sum();
  for (std::uint64_t i = 1; i + 1 < kPageBytes / 4; ++i) {
    const auto shifted = [&](std::uint64_t word, std::uint32_t value) {
      std::uint64_t with = 0, without = 0;
      add_word(with, static_cast<std::uint32_t>(word), value);
      add_word(without, static_cast<std::uint32_t>(word), 0x3c003c00u);
      return with - without;
    };
    ASSERT_NE(constant + shifted(i - 1, 0x3c003c01u) + shifted(i, 0x3c003bfeu) + shifted(i + 1, 0x3c003c01u), constant)
        << "+1 -2 +1 around word " << i;
  }
}

}  // namespace
}  // namespace kvq
