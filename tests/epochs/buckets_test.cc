// A prefix bucket changes its key while it is looked up: no key finds another key's page.
//
// Invariant: a bucket is removed and named again in between, as daemon/core/prefix_index.cc does it.
#include "kvq/prefix_table.h"
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  value_after_tag,           // broken: the value is stored first
  value_is_looked_at_twice,  // broken: the tag is believed
};

// The page of the key whose tag words are `key`.
std::uint64_t page_of(std::uint64_t key) { return (std::uint64_t{1} << 32) | (100 + key); }

struct ModelBucket {
  Word tag[2] = {Word{"tag 0", 1}, Word{"tag 1", 1}};
  Word value{"value", page_of(1)};
};

void rename(ModelBucket& b, std::uint64_t key, Rule broken) {
  M::store(b.value, kTombstone, std::memory_order_release, Site::plain);
  if (broken == Rule::value_after_tag) {
    M::store(b.value, page_of(key), std::memory_order_release, Site::plain);
    for (Word& tag : b.tag) M::store(tag, key, std::memory_order_release, Site::plain);
    return;
  }
  name_bucket<M>(b, key, key, page_of(key));
}

Machine::Scenario lookup(std::uint64_t key, Rule broken = Rule::kept) {
  return [=](Machine& m) {
    const auto b = std::make_shared<ModelBucket>();
    m.thread("daemon", [=] {
      rename(*b, 2, broken);
      rename(*b, 3, broken);
    });
    m.thread("reader", [=] {
      BucketView seen{};
      if (broken == Rule::value_is_looked_at_twice) {
        seen.value = M::load(b->value, std::memory_order_acquire, Site::plain);
        seen.matches = M::load(b->tag[0], std::memory_order_acquire, Site::plain) == key &&
                       M::load(b->tag[1], std::memory_order_acquire, Site::plain) == key;
        seen.matches = seen.matches && seen.value != 0 && seen.value != kTombstone;
      } else {
        seen = view_bucket<M>(*b, key, key);
      }
      expect(!seen.matches || seen.value == page_of(key), "a key finds another key's page");
    });
  };
}

TEST(Buckets, ALookupAgainstTheBucketsNextKeys) {
  for (std::uint64_t key = 1; key <= 3; ++key) holds(lookup(key));
}

class BucketWithout : public testing::TestWithParam<Site> {};
TEST_P(BucketWithout, Fails) { fails("another key's page", lookup(2), GetParam()); }
INSTANTIATE_TEST_SUITE_P(, BucketWithout, testing::ValuesIn(kBucketSites), site_of);

TEST(BucketRules, Fail) {
  fails("another key's page", lookup(2, Rule::value_after_tag));
  fails("another key's page", lookup(2, Rule::value_is_looked_at_twice));
}

}  // namespace
}  // namespace kvq::model
