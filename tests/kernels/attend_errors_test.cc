// What attend and append refuse, and that they name it; append's writes; merge.
#include <thread>

#include "attend_fixture.h"

#if defined(__SANITIZE_THREAD__)
// A forked child that starts threads is what one test is about.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace kvq {
namespace {

Shape small_shape() {
  Shape shape;
  shape.lengths = {128};
  shape.queries = {1};
  shape.group = 2;
  return shape;
}

TEST(AttendErrors, PagesThatCannotBeReadAreTypedErrors) {
  std::mt19937_64 random(test_seed());
  Problem problem(small_shape(), random);
  const Entry good = unpack_entry(problem.pool().entry(2));
  const auto with_state = [&](EntryState state, Format format) {
    problem.pool().entry(2) = pack_entry({1, format, state, good.offset_bytes});
    return attend(problem.call()).error().code;
  };
  EXPECT_EQ(with_state(EntryState::free, Format::dense), Errc::stale_id);
  EXPECT_EQ(with_state(EntryState::lost, Format::dense), Errc::lost_page);
  EXPECT_EQ(with_state(EntryState::host, Format::int4), Errc::lost_page);
  EXPECT_EQ(with_state(EntryState::sealed, static_cast<Format>(9)), Errc::wrong_layout);
  EXPECT_EQ(with_state(EntryState::sealed, Format::none), Errc::wrong_layout);
  EXPECT_EQ(with_state(EntryState::null, Format::none), Errc::ok);
  EXPECT_EQ(with_state(EntryState::sealed, Format::dense), Errc::ok);
  problem.tables()[1] = 3;  // one past the directory
  EXPECT_EQ(attend(problem.call()).error().code, Errc::stale_id);
  problem.tables()[1] = -1;
  EXPECT_EQ(attend(problem.call()).error().code, Errc::stale_id);
}

TEST(AttendErrors, EveryWrongArgumentIsNamed) {
  std::mt19937_64 random(test_seed() + 1);
  Problem problem(small_shape(), random);
  const AttentionCall good = problem.call();
  const auto refused = [&](auto change) {
    AttentionCall call = good;
    change(call);
    const Result<void> result = attend(call);
    EXPECT_NE(result.error().context[0], '\0');
    return result.error().code;
  };
  const std::int32_t negative = -1, too_long = 10'000, backwards[2] = {1, 0};
  const auto invalid = Errc::invalid_argument;
  EXPECT_EQ(refused([](AttentionCall& c) { c.model.layouts = nullptr; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.layer = 1; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.query_heads = 0; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.query_heads = 17; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.q_type = static_cast<Real>(3); }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.out_type = static_cast<Real>(7); }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.scale = NAN; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.softcap = -1; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.window = 0; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.window = -2; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.threads = 0; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.q = nullptr; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.out = nullptr; }), invalid);
  EXPECT_EQ(refused([](AttentionCall& c) { c.block_tables = nullptr; }), invalid);
  EXPECT_EQ(refused([&](AttentionCall& c) { c.lengths = &negative; }), invalid);
  EXPECT_EQ(refused([&](AttentionCall& c) { c.lengths = &too_long; }), invalid);
  EXPECT_EQ(refused([&](AttentionCall& c) { c.query_starts = backwards; }), invalid);
  ModelGeometry odd = *good.model.geometry;
  odd.layer[0].head_dim = 112;
  EXPECT_EQ(refused([&](AttentionCall& c) { c.model.geometry = &odd; }), Errc::wrong_layout);
}

struct AppendCase {
  PagePool pool{one_layer(2, 80, Dtype::bf16), 4, 1 << 20};
  std::vector<std::uint16_t> k, v;
  std::vector<std::int64_t> slots;
  AppendCall call;

  explicit AppendCase(std::vector<std::int64_t> where) : slots(std::move(where)) {
    for (std::uint32_t id = 1; id < 4; ++id) {
      std::byte* page = pool.place(id, Format::dense, id == 2 ? EntryState::sealed : EntryState::open);
      std::fill_n(page, pool.layout(Format::dense).page_bytes, std::byte{0xaa});
    }
    k.resize(slots.size() * 400);
    v.resize(slots.size() * 400);
    for (std::size_t i = 0; i < k.size(); ++i)
      k[i] = static_cast<std::uint16_t>(i), v[i] = static_cast<std::uint16_t>(~i);
    call.model = pool.model();
    call.pages = pool.source();
    call.dtype = Dtype::bf16;
    call.k = k.data();
    call.v = v.data();
    call.k_token_stride = 400, call.k_head_stride = 100;
    call.v_token_stride = 80, call.v_head_stride = 80 * static_cast<std::int64_t>(slots.size());
    call.slots = slots.data();
    call.tokens = static_cast<std::uint32_t>(slots.size());
  }
  std::uint16_t at(std::uint32_t id, std::uint32_t head, std::uint32_t part, std::uint32_t token, std::uint32_t c) {
    const Entry e = unpack_entry(pool.entry(id));
    const auto* block = reinterpret_cast<const std::uint16_t*>(pool.source().arena + e.offset_bytes);
    return block[(head * 2 + part) * 64 * 80 + dense_index(token, c, 80)];
  }
};

TEST(Append, WritesNamedTokensWithAnyStridesAndNothingElse) {
  AppendCase a({1 * 64 + 5, kNoSlot, 3 * 64 + 63, 7, 2 * 64 + 1, 1 * 64 + 6});
  ASSERT_TRUE(append(a.call));
  for (std::uint32_t id = 1; id < 4; ++id) {
    for (std::uint32_t head = 0; head < 2; ++head) {
      for (std::uint32_t token = 0; token < 64; ++token) {
        std::int64_t source = -1;
        for (std::size_t i = 0; i < a.slots.size(); ++i) {
          if (a.slots[i] == id * 64 + token && id != 2) source = static_cast<std::int64_t>(i);
        }
        for (std::uint32_t c = 0; c < 80; ++c) {
          const std::uint16_t k = source < 0 ? 0xaaaa : a.k[source * 400 + head * 100 + c];
          const std::uint16_t v = source < 0 ? 0xaaaa : a.v[source * 80 + head * 80 * a.slots.size() + c];
          ASSERT_EQ(a.at(id, head, 0, token, c), k) << id << ' ' << token;
          ASSERT_EQ(a.at(id, head, 1, token, c), v) << id << ' ' << token;
        }
      }
    }
  }
}

TEST(Append, KeysAndValuesMayComeSeparately) {
  AppendCase a({64 + 9});
  a.call.k = nullptr;
  ASSERT_TRUE(append(a.call));
  EXPECT_EQ(a.at(1, 0, 0, 9, 0), 0xaaaa);
  EXPECT_EQ(a.at(1, 0, 1, 9, 0), a.v[0]);
  a.call.k = a.k.data();
  a.call.v = nullptr;
  ASSERT_TRUE(append(a.call));
  EXPECT_EQ(a.at(1, 1, 0, 9, 3), a.k[103]);
}

TEST(Append, ChecksAllSlotsBeforeItWrites) {
  for (const std::int64_t bad : {std::int64_t{4 * 64}, std::int64_t{-2}, std::int64_t{1} << 60}) {
    AppendCase a({64, bad});
    EXPECT_NE(append(a.call).error().code, Errc::ok);
    EXPECT_EQ(a.at(1, 0, 0, 0, 0), 0xaaaa);
  }
  AppendCase a({64, 3 * 64});
  for (const EntryState state : {EntryState::free, EntryState::host, EntryState::lost}) {
    a.pool.entry(3) = pack_entry({1, Format::dense, state, 0});
    EXPECT_EQ(append(a.call).error().code, state == EntryState::free ? Errc::stale_id : Errc::lost_page);
    EXPECT_EQ(a.at(1, 0, 0, 0, 0), 0xaaaa);
  }
  AppendCase wrong({64});
  wrong.call.dtype = Dtype::fp16;
  EXPECT_EQ(append(wrong.call).error().code, Errc::wrong_layout);
}

TEST(Merge, JoinsStatesAndTreatsEmptyOnesAsNothing) {
  const float empty = -std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  float a[5 * 2] = {1, 2, nan, nan, 5, 6, nan, nan, 1, 1};
  float la[5] = {0.5f, empty, 1, empty, 1000};
  const float b[5 * 2] = {3, 4, 7, 8, nan, nan, nan, nan, 3, 5};
  const float lb[5] = {-0.25f, 2, empty, empty, 1000};
  merge_states(a, la, b, lb, 5, 2);
  const double wa = std::exp(0.5), wb = std::exp(-0.25);
  EXPECT_NEAR(a[0], (1 * wa + 3 * wb) / (wa + wb), 4 * 0x1p-20);
  EXPECT_NEAR(la[0], std::log(wa + wb), 0x1p-22);
  EXPECT_EQ(a[2], 7);
  EXPECT_EQ(la[1], 2);
  EXPECT_EQ(a[4], 5);
  EXPECT_EQ(la[2], 1);
  EXPECT_EQ(a[6], 0);
  EXPECT_EQ(la[3], empty);
  EXPECT_EQ(a[8], 2);
  EXPECT_NEAR(la[4], 1000 + std::log(2.0), 1000 * 0x1p-22);
}

TEST(Merge, TwoHalvesOfASequenceGiveTheWhole) {
  std::mt19937_64 random(test_seed() + 3);
  Shape shape = small_shape();
  shape.lengths = {640};
  shape.formats = {Format::dense, Format::int4};
  Problem problem(shape, random);
  AttentionCall call = problem.call();
  call.causal = false;
  float out[3][128], lse[3][2];
  const std::int32_t lengths[3] = {640, 320, 320};
  const std::int32_t* tables[3] = {call.block_tables, call.block_tables, call.block_tables + 5};
  call.out_token_stride = 128, call.out_head_stride = 64;
  for (int i = 0; i < 3; ++i) {
    call.lengths = &lengths[i];
    call.block_tables = tables[i];
    call.out = out[i];
    call.lse = lse[i];
    ASSERT_TRUE(attend(call));
  }
  merge_states(out[1], lse[1], out[2], lse[2], 2, 64);
  for (int c = 0; c < 128; ++c) EXPECT_NEAR(out[1][c], out[0][c], 2e-5);
  for (int h = 0; h < 2; ++h) EXPECT_NEAR(lse[1][h], lse[0][h], 2e-6 * std::fabs(lse[0][h]) + 1e-6);
}

TEST(Threads, ManyCallersShareThePoolAndAForkedChildStillWorks) {
  std::mt19937_64 random(test_seed() + 4);
  Shape shape = small_shape();
  shape.lengths = {2000};
  Problem problem(shape, random);
  problem.call().threads = 3;
  problem.check(oracle::attend(problem.call()), "threads");
  const auto run_many = [&] {
    AttentionCall call = problem.call();
    std::vector<float> out(2 * call.out_head_stride * 2);
    call.out = out.data();
    call.lse = nullptr;
    for (int i = 0; i < 50; ++i) {
      if (!attend(call) || out[0] != static_cast<float>(problem.output(0, 0))) return false;
    }
    return true;
  };
  bool good[3] = {};
  std::thread a([&] { good[0] = run_many(); }), b([&] { good[1] = run_many(); }), c([&] { good[2] = run_many(); });
  a.join(), b.join(), c.join();
  EXPECT_TRUE(good[0] && good[1] && good[2]);
  // The child inherits a pool whose threads do not exist there.
  EXPECT_EXIT(std::_Exit(run_many() ? 7 : 1), ::testing::ExitedWithCode(7), "");
}

TEST(Targets, NamesAreThoseOfThisMachine) {
  EXPECT_STRNE(supported_targets(), "");
  EXPECT_EQ(std::string(supported_targets()).rfind(best_target_name(), 0), 0u);
  EXPECT_EQ(std::string(supported_targets()).find("SCALAR"), std::string::npos);
}

}  // namespace
}  // namespace kvq
