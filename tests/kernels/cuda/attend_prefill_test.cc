// The device's attention with many query rows against the double-precision oracle: verify (a few query tokens) and
// chunks of prefill, over every format, group, mask and ragged mixes of both.
//
// Invariant: each shape runs with tiles of 64 and of 128 rows, whatever its own rows are.
#include "gpu_fixture.h"

namespace kvq {
namespace {

double check_both(Problem& problem, std::uint32_t group, const std::string& what) {
  const std::vector<oracle::Row> expected = oracle::attend(problem.call());
  DeviceProblem device(problem);
  double worst = 0;
  for (const std::uint32_t hint : {64 / group, 4096u}) {  // at most 64 rows, and more
    device.launch.max_query_tokens = hint;
    EXPECT_TRUE(device.many_rows());
    worst = std::max(worst, device.check(expected, what + ", hint " + std::to_string(hint)));
  }
  return worst;
}

Shape shape_of_rows(std::uint32_t d, std::uint32_t group, Dtype dtype) {
  Shape shape;
  shape.d = d;
  shape.group = group;
  shape.dtype = dtype;
  shape.q_type = dtype == Dtype::fp16 ? Real::fp16 : Real::bf16;
  return shape;
}

TEST(DevicePrefill, OnePageOfEachFormatMatchesTheOracle) {
  std::mt19937_64 random(test_seed() + 40);
  for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
    for (const std::uint32_t d : {64u, 128u}) {
      for (const Format format : kFormats) {
        Shape shape = shape_of_rows(d, 1, dtype);
        shape.lengths = {64};
        shape.queries = {64};
        shape.formats = {format};
        Problem problem(shape, random);
        problem.call().causal = false;
        check_both(problem, 1,
                   "d " + std::to_string(d) + " format " + std::to_string(index_of(format)) + " dtype " +
                       std::to_string(int(dtype)));
      }
    }
  }
}

TEST(DevicePrefill, EveryFormatAndTypeMatchesTheOracle) {
  std::mt19937_64 random(test_seed() + 41);
  double worst = 0;
  for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
    for (const std::uint32_t d : {64u, 128u}) {
      for (const Format format : kFormats) {
        Shape shape = shape_of_rows(d, 4, dtype);
        shape.kv_heads = 2;
        shape.lengths = {700, 130, 333, 64};
        shape.queries = {100, 7, 1, 64};
        shape.formats = {format};
        Problem problem(shape, random);
        worst = std::max(worst, check_both(problem, 4,
                                           "d " + std::to_string(d) + " format " + std::to_string(index_of(format)) +
                                               " dtype " + std::to_string(int(dtype))));
      }
    }
  }
  std::printf("largest share of its bound: %.3f\n", worst);
}

TEST(DevicePrefill, EveryGroupSizeMatchesTheOracle) {
  std::mt19937_64 random(test_seed() + 42);
  for (std::uint32_t group = 1; group <= kMaxGroup; ++group) {
    Shape shape = shape_of_rows(group % 2 != 0 ? 64 : 128, group, group % 3 != 0 ? Dtype::bf16 : Dtype::fp16);
    shape.out_type = shape.q_type;
    shape.lengths = {900, 190, 65};
    shape.queries = {150, 16, 3};
    shape.formats = kAllFormats;
    Problem problem(shape, random);
    check_both(problem, group, "group " + std::to_string(group));
  }
}

TEST(DevicePrefill, WindowsSoftcapSinksAndAlibiMatchTheOracle) {
  std::mt19937_64 random(test_seed() + 43);
  const float sinks[8] = {0, 1.5f, -3, 20, -20, 0.25f, -std::numeric_limits<float>::infinity(), 5};
  const float slopes[8] = {0.5f, 0.0625f, 0, 0.00390625f, 1, 0.25f, 0.125f, 0.03125f};
  for (const std::uint32_t d : {64u, 128u}) {
    Shape shape = shape_of_rows(d, 4, d == 64 ? Dtype::fp16 : Dtype::bf16);
    shape.kv_heads = 2;
    shape.lengths = {700, 0, 40, 777, 20};
    shape.queries = {90, 2, 40, 1, 25};
    shape.formats = kAllFormats;
    shape.null_pages = true;
    Problem problem(shape, random);
    AttentionCall& call = problem.call();
    for (const bool causal : {true, false}) {
      call.causal = causal;
      for (const int window : {-1, 1, 2, 63, 64, 65, 130, 1000}) {
        call.window = window;
        check_both(problem, 4, "window " + std::to_string(window));
      }
      call.sinks = sinks;
      check_both(problem, 4, "sink");
      call.softcap = 5;
      call.window = 90;
      call.scale = -0.31f;
      check_both(problem, 4, "softcap, window, sink");
      call.softcap = 0;
      call.alibi = slopes;
      check_both(problem, 4, "alibi, window, sink");
      call.window = -1, call.scale = 0;
      check_both(problem, 4, "alibi");
      call.alibi = call.sinks = nullptr;
    }
  }
}

TEST(DevicePrefill, HistoriesCutBetweenBlocksMatchTheOracle) {
  std::mt19937_64 random(test_seed() + 44);
  for (const std::uint32_t d : {64u, 128u}) {
    Shape shape = shape_of_rows(d, 2, Dtype::fp16);
    shape.kv_heads = 1;
    shape.lengths = {20000, 3000, 5, 9000};
    shape.queries = {16, 300, 2, 1};
    shape.formats = kAllFormats;
    Problem problem(shape, random);
    check_both(problem, 2, "cut");
    problem.call().scale = 1e-3f;  // every key weighs about the same
    check_both(problem, 2, "cut, alike");
  }
}

TEST(DevicePrefill, ManySequencesMatchTheOracle) {
  std::mt19937_64 random(test_seed() + 45);
  Shape shape = shape_of_rows(128, 8, Dtype::fp16);
  shape.kv_heads = 2;
  for (int s = 0; s < 90; ++s) {
    shape.lengths.push_back(int(random() % 300));
    shape.queries.push_back(int(random() % 24));
  }
  shape.formats = kAllFormats;
  Problem problem(shape, random);
  check_both(problem, 8, "many sequences");
}

TEST(DevicePrefill, LargeLogitsNeitherOverflowNorVanish) {
  std::mt19937_64 random(test_seed() + 46);
  for (const Format f : kFormats) {
    Shape shape = shape_of_rows(128, 2, Dtype::fp16);
    shape.lengths = {256};
    shape.queries = {20};
    shape.formats = {f};
    Problem problem(shape, random);
    for (const float scale : {1e-4f, 30.0f, -30.0f, 3000.0f}) {
      problem.call().scale = scale;
      check_both(problem, 2, "scale " + std::to_string(scale));
    }
  }
}

TEST(DevicePrefill, RandomMixesOfEverythingMatchTheOracle) {
  std::mt19937_64 random(test_seed() + 47);
  const auto draw = [&](int low, int high) { return low + int(random() % std::uint64_t(high - low + 1)); };
  double worst = 0;
  for (int i = 0; i < 120 && !testing::Test::HasFailure(); ++i) {
    const auto group = static_cast<std::uint32_t>(draw(1, 16));
    Shape shape = shape_of_rows(draw(0, 1) == 0 ? 64 : 128, group, static_cast<Dtype>(draw(0, 1)));
    shape.kv_heads = draw(1, 3);
    shape.out_type = static_cast<Real>(draw(0, 2));
    for (int s = draw(1, 5); s > 0; --s) {
      shape.lengths.push_back(draw(0, 3) == 0 ? draw(0, 70) : draw(1, 600));
      shape.queries.push_back(draw(0, 2) != 0 ? draw(0, 90) : 1);
    }
    shape.formats.clear();
    for (const Format f : kFormats) {
      if (draw(0, 1) == 0) shape.formats.push_back(f);
    }
    if (shape.formats.empty()) shape.formats = {Format::int4};
    shape.null_pages = draw(0, 3) == 0;
    Problem problem(shape, random);
    AttentionCall& call = problem.call();
    std::vector<float> slopes(call.query_heads), sinks(call.query_heads);
    std::normal_distribution<float> normal;
    for (float& x : slopes) x = std::fabs(normal(random)) / 8;
    for (float& x : sinks) x = 3 * normal(random);
    call.causal = draw(0, 3) != 0;
    if (draw(0, 2) == 0) call.window = draw(1, 300);
    if (draw(0, 2) == 0) call.softcap = float(draw(1, 40));
    if (draw(0, 2) == 0) call.alibi = slopes.data();
    if (draw(0, 2) == 0) call.sinks = sinks.data();
    if (draw(0, 3) == 0) call.scale = normal(random);
    worst = std::max(worst, check_both(problem, group, "random mix " + std::to_string(i)));
  }
  std::printf("largest share of its bound that a random mix used: %.3f\n", worst);
}

std::uint16_t* block_of(Problem& problem, std::uint32_t page) {
  const Entry entry = unpack_entry(problem.pool().entry(page));
  return reinterpret_cast<std::uint16_t*>(problem.pool().source().arena + entry.offset_bytes);
}

TEST(DevicePrefill, NanInAVisibleKeyReachesItsRowsAndNoOthers) {
  std::mt19937_64 random(test_seed() + 48);
  for (const std::uint32_t hint : {32u, 4096u}) {
    Shape shape = shape_of_rows(64, 2, Dtype::fp16);
    shape.lengths = {128};
    shape.queries = {20};
    Problem problem(shape, random);
    block_of(problem, 2)[dense_index(62, 5, 64)] = 0x7e00;  // seen by the last two query tokens
    DeviceProblem device(problem);
    device.launch.max_query_tokens = hint;
    ASSERT_TRUE(device.run());
    for (std::uint32_t row = 0; row < 40; ++row) {
      EXPECT_EQ(std::isnan(device.output(row, 7)), row >= 36) << row;
      EXPECT_EQ(std::isnan(device.lse[row]), row >= 36) << row;
    }
  }
}

TEST(DevicePrefill, AFaultIsReportedAndCostsOnlyItsRows) {
  std::mt19937_64 random(test_seed() + 49);
  for (const std::uint32_t hint : {32u, 4096u}) {
    Shape shape = shape_of_rows(128, 2, Dtype::bf16);
    shape.lengths = {256, 192};
    shape.queries = {16, 100};
    shape.formats = kAllFormats;
    Problem problem(shape, random);
    const std::vector<oracle::Row> expected = oracle::attend(problem.call());
    DeviceProblem device(problem);
    device.launch.max_query_tokens = hint;
    device.check(expected, "before the fault");
    problem.pool().entry(6) = pack_entry({1, Format::dense, EntryState::lost, 0});  // tokens 64 to 127 of 192
    device.pool.update_entries();
    EXPECT_TRUE(device.run());
    EXPECT_EQ(device.fault.take(), cuda::pack_fault(Errc::lost_page, 0, 1, 6));
    device.compare(expected, "the other sequence", 0);
    for (std::uint32_t token = 0; token < 100; ++token) {
      EXPECT_TRUE(std::isnan(device.output((16 + token) * 2, 3))) << token;  // all see the token at 64
    }
    const std::int64_t stride = problem.call().block_table_stride;
    device.update_lengths({256, 64 * static_cast<std::int32_t>(stride) + 1});  // a length that its table does not hold
    EXPECT_TRUE(device.run());
    EXPECT_NE(device.fault.take(), 0u);
  }
}

TEST(DevicePrefill, ACapturedCallFollowsLengthsAndTables) {
  std::mt19937_64 random(test_seed() + 50);
  for (const std::uint32_t hint : {16u, 4096u}) {
    Shape shape = shape_of_rows(128, 4, Dtype::fp16);
    shape.kv_heads = 2;
    shape.lengths = {1000, 164, 333};
    shape.queries = {90, 1, 20};
    shape.formats = kAllFormats;
    Problem problem(shape, random);
    DeviceProblem device(problem);
    device.launch.max_query_tokens = hint;
    check_replays(problem, device, {{1000, 164, 333}, {90, 1, 20}, {960, 10, 64}, {0, 0, 0}, {65, 64, 320}});
  }
}

}  // namespace
}  // namespace kvq
