// What a server does with block tables: aliases, dropped pages, slots, parking.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/daemon_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

// One query over `length` tokens through `table`; returns what came out.
std::vector<float> attend(TinyModel& tiny, const std::vector<std::int32_t>& table, std::int32_t length, bool aliases,
                          std::int32_t window) {
  std::vector<float> q(kQueryHeads * kHeadDim), out(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i % 7) - 3;
  const std::int32_t starts[] = {0, 1};
  kvq_attend_args args{};
  args.size = sizeof(args);
  args.batch = 1;
  args.q = q.data();
  args.out = out.data();
  args.q_token_stride = args.out_token_stride = kQueryHeads * kHeadDim;
  args.q_head_stride = args.out_head_stride = kHeadDim;
  args.q_dtype = args.out_dtype = KVQ_FP32;
  args.query_starts = starts;
  args.seq_lengths = &length;
  args.block_table = table.data();
  args.block_table_stride = static_cast<std::int64_t>(table.size());
  args.table_has_aliases = aliases;
  args.query_heads = kQueryHeads;
  args.window = window;
  args.threads = 1;
  const Step step(tiny.model());
  tiny.model().attend(args);
  return out;
}

class Views : public ::testing::Test {
 protected:
  DaemonProcess daemon_{calm_settings()};
  TinyModel tiny_{daemon_.socket(), {}};
};

TEST_F(Views, AliasesNamePagesForAttention) {
  Sequence sequence = tiny_.model().open({});
  tiny_.write(sequence, 0, token_stream(1, 150));
  const auto table = sequence.block_table();
  const kvq_alias aliases[] = {{700, table[0]}, {3, table[1]}, {41, table[2]}};
  check(kvq_set_aliases(tiny_.get(), aliases, 3));
  EXPECT_EQ(attend(tiny_, {700, 3, 41}, 150, true, -1), attend(tiny_, table, 150, false, -1));
  EXPECT_NE(attend(tiny_, {3, 700, 41}, 150, true, -1), attend(tiny_, table, 150, false, -1));
}

TEST_F(Views, DroppedPagesBecomeTheNullPageOutsideTheWindow) {
  Sequence sequence = tiny_.model().open({});
  tiny_.write(sequence, 0, token_stream(1, 200));
  const auto whole = attend(tiny_, sequence.block_table(), 200, false, 50);
  sequence.drop_before(140);
  const auto table = sequence.block_table();
  ASSERT_EQ(table.size(), 4u);
  EXPECT_EQ(table[0], KVQ_NULL_PAGE);
  EXPECT_EQ(table[1], KVQ_NULL_PAGE);
  EXPECT_NE(table[2], KVQ_NULL_PAGE);
  EXPECT_EQ(attend(tiny_, table, 200, false, 50), whole);
  EXPECT_EQ(kvq_truncate(sequence.get(), 70, 1000), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "dropped"), nullptr) << kvq_last_error();
  Sequence child = sequence.fork(5000);
  EXPECT_EQ(child.block_table()[1], KVQ_NULL_PAGE);
  EXPECT_EQ(attend(tiny_, child.block_table(), 200, false, 50), whole);
  tiny_.write(child, 200, token_stream(2, 60));
}

TEST_F(Views, SlotsFollowTheBlockTable) {
  Sequence sequence = tiny_.model().open({});
  sequence.reserve(100, 10'000);
  const auto table = sequence.block_table();
  const auto slots = sequence.slot_mapping(60, 10);
  for (std::int64_t i = 0; i < 10; ++i) {
    EXPECT_EQ(slots[static_cast<std::size_t>(i)], table[static_cast<std::size_t>((60 + i) / 64)] * 64 + (60 + i) % 64);
  }
  std::int64_t out[1];
  EXPECT_EQ(kvq_slot_mapping(sequence.get(), 128, 1, out), KVQ_ERR_INVALID_ARGUMENT);
}

TEST_F(Views, ExtraKeysAndFingerprintsKeepPrefixesApart) {
  const auto tokens = token_stream(1, 64);
  const char adapter[] = "adapter";
  const kvq_extra_key extra{0, 64, adapter, sizeof(adapter)};
  kvq_open_options options{};
  options.size = sizeof(options);
  options.extra_keys = &extra;
  options.extra_key_count = 1;
  {
    Sequence sequence = tiny_.model().open({}, nullptr, &options);
    tiny_.write(sequence, 0, tokens);
  }
  kvq_lookup_result found{};
  found.size = sizeof(found);
  tiny_.await("for the page with its extra key", [&] {
    check(kvq_lookup(tiny_.get(), tokens.data(), tokens.size(), &extra, 1, &found));
    return found.cached_tokens == 64;
  });
  EXPECT_EQ(tiny_.model().lookup(tokens).cached_tokens, 0u);
  ModelOptions other_weights;
  other_weights.fingerprint = 2;
  TinyModel other(daemon_.socket(), other_weights);
  check(kvq_lookup(other.get(), tokens.data(), tokens.size(), &extra, 1, &found));
  EXPECT_EQ(found.cached_tokens, 0u);
}

TEST_F(Views, NothingIsLostOnTheHostDevice) {
  Sequence sequence = tiny_.model().open({});
  tiny_.write(sequence, 0, token_stream(1, 64));
  std::size_t count = 1;
  std::uint64_t now = 1;
  check(kvq_lost_pages(tiny_.get(), 0, nullptr, nullptr, 0, &count, &now));
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(now, 0u);
  sequence.park();
  sequence.resume(10'000);
  EXPECT_EQ(sequence.info().lost_pages, 0u);
  EXPECT_EQ(tiny_.attend_and_check(sequence.block_table(), 64, 1, 1).exact, 1u);
}

}  // namespace
}  // namespace kvq::test
