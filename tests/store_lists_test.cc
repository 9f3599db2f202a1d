// What operators see of sequences and of the prefix index, on a real store with simulated clients.
#include <gmock/gmock.h>

#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

using ::testing::ElementsAre;

constexpr std::size_t kDense = static_cast<std::size_t>(Format::dense), kInt4 = static_cast<std::size_t>(Format::int4);
constexpr std::uint64_t kDenseBytes = 16384;

class Lists : public ::testing::Test {
 protected:
  SequenceList sequences(SessionId session = {}, std::uint32_t limit = 100) const {
    return node.store->sequences(std::nullopt, session, limit, node.now_ms);
  }
  PrefixStatus prefix(std::uint32_t limit = 100) const { return node.store->prefix(std::nullopt, limit, node.now_ms); }
  static std::vector<std::uint32_t> numbers(const SequenceList& list) {
    std::vector<std::uint32_t> out;
    for (const SequenceStatus& s : list.longest) out.push_back(raw(s.sequence));
    return out;
  }
  static std::vector<PageId> leaves(const PrefixStatus& status) {
    std::vector<PageId> out;
    for (const ChainStatus& c : status.chains) out.push_back(c.page);
    return out;
  }

  StoreNode node{8};
  const TenantId tenant = node.tenant("a");
  std::unique_ptr<SimClient> client = node.client(tenant), other = node.client(tenant);
  SimServer one{node, *client}, two{node, *other};
};

TEST_F(Lists, SequencesComeLongestFirst) {
  one.grow(1, 7, 1);
  one.grow(2, 8, 3);
  two.grow(3, 9, 2);
  EXPECT_THAT(numbers(sequences()), ElementsAre(2u, 3u, 1u));
  EXPECT_EQ(sequences().total, 3u);
  EXPECT_THAT(numbers(sequences({}, 1)), ElementsAre(2u));
  EXPECT_EQ(sequences({}, 1).total, 3u);
  EXPECT_THAT(numbers(sequences(other->id)), ElementsAre(3u));
  EXPECT_EQ(sequences(other->id).total, 1u);
  EXPECT_EQ(node.store->sequences(node.tenant("b"), {}, 100, node.now_ms).total, 0u);
}

TEST_F(Lists, ASequenceTellsWhatItHoldsAndWithWhom) {
  one.grow(1, 7, 3);
  ASSERT_TRUE(two.attach(5, 7, 2));
  one.park(1);
  node.tick(40);
  const SequenceList list = sequences();
  ASSERT_EQ(list.longest.size(), 2u);
  const SequenceStatus &longest = list.longest[0], &attached = list.longest[1];
  EXPECT_FALSE(longest.running);
  EXPECT_EQ(longest.pages, 3u);
  EXPECT_EQ(longest.shared_pages, 2u);
  EXPECT_EQ(longest.format[kDense].pages, 3u);
  EXPECT_EQ(longest.format[kDense].bytes, 3 * kDenseBytes);
  EXPECT_GE(longest.idle_ms, 40u);
  EXPECT_TRUE(attached.running);
  EXPECT_EQ(attached.session, other->id);
  EXPECT_EQ(attached.tokens, 2 * kPageTokens);
  EXPECT_EQ(attached.shared_pages, 2u);
}

TEST_F(Lists, ASequenceThatGaveUpItsBeginningHoldsTheRest) {
  one.grow(1, 7, 3);
  one.act(CommandKind::drop_before, 1, 2);
  EXPECT_EQ(sequences().longest[0].pages, 1u);
  EXPECT_EQ(sequences().longest[0].format[kDense].pages, 1u);
}

TEST_F(Lists, QuantizedPagesAreCountedAsSuch) {
  one.grow(1, 7, 3);
  one.release(1);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(20);
  const PrefixStatus status = prefix();
  ASSERT_EQ(status.chains.size(), 1u);
  EXPECT_EQ(status.chains[0].format[kInt4].pages, 3u);
  EXPECT_EQ(status.tenants[0].indexed[kInt4], 3u);
  EXPECT_EQ(status.tenants[0].indexed[kDense], 0u);
  ASSERT_TRUE(two.attach(5, 7, 3));
  EXPECT_EQ(sequences().longest[0].format[kInt4].pages, 3u);
  node.store->check_invariants();
}

TEST_F(Lists, ChainsComeLongestUnusedFirst) {
  const auto first = one.grow(1, 7, 3);
  node.tick(10);
  const auto second = one.grow(2, 8, 2);
  node.tick(10);
  const auto third = one.grow(3, 9, 1);
  one.release(2);
  node.tick(5);
  one.release(1);
  node.tick(10);
  const PrefixStatus status = prefix();
  ASSERT_EQ(status.chains.size(), 3u);
  EXPECT_EQ(status.chains[2].page, third[0]);
  EXPECT_EQ(status.chains[2].references, 1u);
  EXPECT_EQ(status.chains[2].idle_ms, 0u) << "a running sequence holds it";
  EXPECT_GE(status.chains[0].idle_ms, status.chains[1].idle_ms);
  for (std::size_t i = 0; i < 2; ++i) {
    const ChainStatus& c = status.chains[i];
    EXPECT_EQ(c.pages, c.page == first[2] ? 3u : 2u);
    EXPECT_TRUE(c.page == first[2] || c.page == second[1]);
    EXPECT_EQ(c.references, 0u);
    EXPECT_GE(c.idle_ms, 10u);
  }
  EXPECT_EQ(status.tenants[0].indexed[kDense], 6u);
  EXPECT_EQ(status.tenants[0].cached[kDense], 5u);
  EXPECT_EQ(status.tenants[0].capacity, 512u);  // twice the page ids
  EXPECT_TRUE(status.complete);
  EXPECT_THAT(leaves(prefix(1)), ElementsAre(status.chains[0].page));
}

TEST_F(Lists, ABranchIsAChainOfItsOwn) {
  const auto trunk = one.grow(1, 7, 3);
  ASSERT_TRUE(one.attach(2, 7, 2));
  ASSERT_TRUE(one.want(1));
  const Key key = chain_key(99, 2);
  const MagazineItem item = one.take(2, 2, key);
  one.seal(2, 2, item, key);
  one.drain();
  EXPECT_THAT(leaves(prefix()), ::testing::UnorderedElementsAre(trunk[2], item.page));
  for (const ChainStatus& c : prefix().chains) EXPECT_EQ(c.pages, 3u);
  EXPECT_EQ(prefix().tenants[0].indexed[kDense], 4u);
}

TEST(ListsOfTenants, EachHasItsSumsAndAreAskedForAlone) {
  StoreNode node(8);
  const TenantId a = node.tenant("a"), b = node.tenant("b");
  auto of_a = node.client(a), of_b = node.client(b);
  SimServer one{node, *of_a}, two{node, *of_b};
  one.grow(1, 7, 3);
  two.grow(1, 7, 1);
  EXPECT_EQ(node.store->prefix(std::nullopt, 100, node.now_ms).tenants.size(), 2u);
  const PrefixStatus alone = node.store->prefix(b, 100, node.now_ms);
  ASSERT_EQ(alone.tenants.size(), 1u);
  EXPECT_EQ(alone.tenants[0].indexed[kDense], 1u);
  ASSERT_EQ(alone.chains.size(), 1u);
  EXPECT_EQ(alone.chains[0].tenant, b);
}

// With a bound of a few pages: what is beyond it is left out, and said to be.
TEST(ListsBound, LessIsLookedAtThanThereIs) {
  StoreConfig config = StoreNode::small();
  config.most_pages_looked = 4;
  StoreNode node(8, config);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  s.grow(1, 7, 3);
  s.grow(2, 8, 2);
  s.grow(3, 9, 2);
  const SequenceList list = node.store->sequences(std::nullopt, {}, 100, node.now_ms);
  EXPECT_EQ(list.longest.size(), 1u);
  EXPECT_EQ(list.total, 3u);
  s.release(1);
  node.tick(5);
  s.release(2);
  const PrefixStatus status = node.store->prefix(std::nullopt, 100, node.now_ms);
  EXPECT_FALSE(status.complete);
  ASSERT_EQ(status.chains.size(), 1u);
  EXPECT_EQ(status.chains[0].pages, 3u) << "the longest unused one is there, and no part of the next";
}

}  // namespace
}  // namespace kvq::testing
