// Prefix keys against vectors that Python's hashlib computed from the definition in prefix_table.h.
#include "client/prefix_keys.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

namespace kvq::client {
namespace {

std::string hex(const Key& key) {
  std::string out;
  for (const std::uint8_t byte : key) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

class PrefixKeys : public ::testing::Test {
 protected:
  PrefixKeys() {
    std::iota(salt_.begin(), salt_.end(), std::uint8_t{0});
    std::iota(fingerprint_.begin(), fingerprint_.end(), std::uint8_t{100});
    geometry_.layers = 2;
    geometry_.layer[0] = {2, 64, Dtype::fp16, 0};
    geometry_.layer[1] = {1, 128, Dtype::bf16, 1};
    for (std::uint64_t i = 0; i < tokens_.size(); ++i) tokens_[i] = static_cast<std::uint32_t>(i * 2654435761 % 50000);
  }
  Key root() { return hasher_.root(salt_, fingerprint_, geometry_); }
  Key page(const Key& parent, std::uint64_t p, std::span<const ExtraKey> extra = {}) {
    return hasher_.page(parent, p, tokens_.data() + p * kPageTokens, extra);
  }

  PrefixHasher hasher_;
  std::array<std::uint8_t, 32> salt_, fingerprint_;
  ModelGeometry geometry_;
  std::array<std::uint32_t, 192> tokens_;
};

TEST_F(PrefixKeys, RootEqualsTheFixedVector) {
  EXPECT_EQ(hex(root()), "92d167e36a611cac5bfc67974908d79abd064e9f9e5b1c8fb17cef787b14d973");
}

TEST_F(PrefixKeys, ChainedPagesEqualTheFixedVectors) {
  const Key first = page(root(), 0);
  EXPECT_EQ(hex(first), "976c49480d68ed7c24770d527af67c55c75b679617004d54b01f4a56dcf3ffee");
  EXPECT_EQ(hex(page(first, 1)), "60186f12e1e60ed466d7b9624a0112d59d37ea9072eae89907b8e1d6866589fb");
}

TEST_F(PrefixKeys, ExtraKeysEnterTheirPagesOnly) {
  const Key first = page(root(), 0);
  const ExtraKey adapter{64, 10, "adapter-7"};
  EXPECT_EQ(hex(page(first, 1, {&adapter, 1})), "d049fad7c6a950f80e15be94a6382186b4544278aa4e5e104d12706cf80a59d9");
  EXPECT_EQ(page(root(), 0, {&adapter, 1}), first);
  const ExtraKey two[] = {{0, 1000, "a"}, {191, 1, "bc"}};
  EXPECT_EQ(hex(page(page(first, 1), 2, two)), "070d80c4cf8ec9c74772f18edfa160e5d30ffdf648cafba76a0c48a490f62d7f");
}

TEST_F(PrefixKeys, ExtraKeyTouchesBoundariesFromBothSides) {
  const Key plain = page(root(), 1);
  const auto differs = [&](std::uint64_t first, std::uint64_t tokens) {
    const ExtraKey extra{first, tokens, "x"};
    return page(root(), 1, {&extra, 1}) != plain;
  };
  EXPECT_FALSE(differs(0, 64));
  EXPECT_TRUE(differs(0, 65));
  EXPECT_TRUE(differs(127, 1));
  EXPECT_FALSE(differs(128, 1));
  EXPECT_FALSE(differs(70, 0));
  EXPECT_TRUE(differs(1, UINT64_MAX));
}

TEST_F(PrefixKeys, MovedBytesBetweenExtraKeysChangeTheKey) {
  const ExtraKey one[] = {{0, 64, "ab"}, {0, 64, "c"}}, other[] = {{0, 64, "a"}, {0, 64, "bc"}};
  EXPECT_NE(page(root(), 0, one), page(root(), 0, other));
}

TEST_F(PrefixKeys, EveryFieldOfTheModelChangesTheRoot) {
  const Key base = root();
  const ModelGeometry before = geometry_;
  geometry_.layer[1].keep_dense = 0;
  EXPECT_NE(root(), base);
  geometry_ = before;
  geometry_.layer[0].dtype = Dtype::bf16;
  EXPECT_NE(root(), base);
  geometry_ = before;
  salt_[31] ^= 1;
  EXPECT_NE(root(), base);
  salt_[31] ^= 1;
  fingerprint_[0] ^= 1;
  EXPECT_NE(root(), base);
}

}  // namespace
}  // namespace kvq::client
