// Attention on every vector target against the oracle, over shapes that do not divide evenly.
#include "attend_fixture.h"

namespace kvq {
namespace {

void check_on_all_targets(Problem& problem, const char* what) {
  const std::vector<oracle::Row> expected = oracle::attend(problem.call());
  for (const std::int64_t target : vector_targets()) {
    WithTarget use(target);
    const double share = problem.check(expected, hwy::TargetName(target));
    if (getenv("SHARE")) printf("%s share %g q %d\n", what, share, expected[0].quantized);
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << what << ", share of the bound " << share;
      return;
    }
  }
}

TEST(Attend, EveryHeadSizeAndFormatMatchesTheOracle) {
  std::mt19937_64 random(test_seed());
  for (const std::uint32_t d : kHeadDims) {
    for (const Format f : kFormats) {
      for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
        Problem problem(shape_of_heads(d, f, dtype), random);
        check_on_all_targets(problem, "head size and format");
      }
    }
  }
}

TEST(Attend, EveryGroupSizeMatchesTheOracle) {
  std::mt19937_64 random(test_seed() + 1);
  for (std::uint32_t group = 1; group <= kMaxGroup; ++group) {
    Problem problem(shape_of_group(group), random);
    check_on_all_targets(problem, "group");
  }
}

TEST(Attend, LengthsAroundPagesMixWithManyQueryTokensInOneCall) {
  std::mt19937_64 random(test_seed() + 2);
  for (const Real out : {Real::fp16, Real::bf16, Real::fp32}) {
    Problem problem(shape_around_pages(80, out), random);
    const std::vector<oracle::Row> expected = oracle::attend(problem.call());
    for (const int threads : {1, 2, 3}) {
      problem.call().threads = threads;
      problem.check(expected, "threads");
    }
    const std::size_t rows = expected.size();
    EXPECT_EQ(problem.lse(rows - 1), -std::numeric_limits<float>::infinity());
    EXPECT_EQ(problem.output(rows - 1, 0), 0);
  }
}

TEST(Attend, WindowEdgesInsideSealedPagesSkipPagesAndMaskTokens) {
  std::mt19937_64 random(test_seed() + 3);
  Shape shape;
  shape.d = 96;
  shape.group = 7;
  shape.dtype = shape.dtype;
  shape.lengths = {500, 321};
  shape.queries = {5, 70};
  shape.formats = kAllFormats;
  Problem problem(shape, random);
  for (const bool causal : {true, false}) {
    for (const int window : {1, 2, 63, 64, 65, 100, 129, 1000}) {
      problem.call().causal = causal;
      problem.call().window = window;
      check_on_all_targets(problem, "window");
    }
  }
  // Pages that no row sees may have any id in the table.
  problem.call().window = 100;
  problem.call().causal = true;
  const std::vector<oracle::Row> expected = oracle::attend(problem.call());
  problem.tables()[0] = 1 << 30;
  problem.tables()[5] = 0;  // position 320: seen, so this one does change the result
  problem.tables()[5] = 6;
  problem.check(expected, "skipped page");
}

TEST(Attend, SoftcapWindowAndSinkTogether) {
  std::mt19937_64 random(test_seed() + 4);
  Shape shape;
  shape.d = 256;
  shape.kv_heads = 2;
  shape.group = 4;
  shape.lengths = {300, 0, 40};
  shape.queries = {9, 1, 1};
  shape.formats = kAllFormats;
  Problem problem(shape, random);
  const float sinks[8] = {0, 1.5f, -3, 20, -20, 0.25f, -std::numeric_limits<float>::infinity(), 5};
  problem.call().softcap = 5;
  problem.call().window = 90;
  problem.call().sinks = sinks;
  problem.call().scale = 0.31f;
  check_on_all_targets(problem, "softcap, window, sink");
  problem.call().softcap = 0;
  check_on_all_targets(problem, "window, sink");
}

TEST(Attend, AlibiMatchesTheOracle) {
  std::mt19937_64 random(test_seed() + 5);
  Shape shape;
  shape.d = 64;
  shape.kv_heads = 2;
  shape.group = 2;
  shape.lengths = {700};
  shape.queries = {3};
  shape.formats = kAllFormats;
  Problem problem(shape, random);
  const float slopes[4] = {0.5f, 0.0625f, 0, 0.00390625f};
  problem.call().alibi = slopes;
  for (const bool causal : {true, false}) {
    problem.call().causal = causal;
    check_on_all_targets(problem, "alibi");
  }
}

TEST(Attend, LargeLogitsNeitherOverflowNorVanish) {
  std::mt19937_64 random(test_seed() + 6);
  Shape shape;
  shape.d = 128;
  shape.group = 2;
  shape.q_type = Real::fp32;
  shape.lengths = {256};
  shape.queries = {2};
  Problem problem(shape, random);
  for (const float scale : {1e-4f, 30.0f, -30.0f, 3000.0f}) {  // the last: logits near 1e5, beyond any finite sentinel
    problem.call().scale = scale;
    check_on_all_targets(problem, "scale");
  }
}

TEST(Attend, NanInAVisibleTokenReachesItsRowsAndNoOthers) {
  std::mt19937_64 random(test_seed() + 7);
  Shape shape;
  shape.lengths = {128};
  shape.queries = {2};
  shape.group = 2;
  Problem problem(shape, random);
  const Entry entry = unpack_entry(problem.pool().entry(2));
  auto* k = reinterpret_cast<std::uint16_t*>(problem.pool().source().arena + entry.offset_bytes);
  k[dense_index(63, 5, 64)] = 0x7e00;  // seen by the last query token only
  for (const std::int64_t target : vector_targets()) {
    WithTarget use(target);
    ASSERT_TRUE(attend(problem.call()));
    for (std::uint32_t head = 0; head < 2; ++head) {
      EXPECT_TRUE(std::isfinite(problem.output(head, 0))) << hwy::TargetName(target);
      EXPECT_TRUE(std::isnan(problem.output(2 + head, 0))) << hwy::TargetName(target);
      EXPECT_TRUE(std::isnan(problem.lse(2 + head)));
    }
  }
}

TEST(Attend, NanQueryIsNotHiddenByIntegerOperands) {
  std::mt19937_64 random(test_seed() + 8);
  for (const Format f : kFormats) {
    Shape shape;
    shape.lengths = {192};
    shape.queries = {1};
    shape.group = 4;
    shape.q_type = Real::fp32;
    shape.formats = {f};
    Problem problem(shape, random);
    auto* q = const_cast<float*>(static_cast<const float*>(problem.call().q));
    q[1 * problem.call().q_head_stride + 3] = std::numeric_limits<float>::infinity();
    for (const std::int64_t target : vector_targets()) {
      WithTarget use(target);
      ASSERT_TRUE(attend(problem.call()));
      EXPECT_TRUE(std::isnan(problem.output(1, 0))) << hwy::TargetName(target) << " format " << index_of(f);
      EXPECT_TRUE(std::isfinite(problem.output(0, 0)));
      EXPECT_TRUE(std::isfinite(problem.output(2, 0)));
    }
  }
}

TEST(Attend, PagesBeyondFourGigabytesAreReached) {
  std::mt19937_64 random(test_seed() + 9);
  const std::uint64_t arena = std::uint64_t{20} << 30;
  PagePool pool(one_layer(1, 64, Dtype::fp16), 1001, arena);
  const std::int32_t table[3] = {1000, 17, 999}, length = 192, starts[2] = {0, 1};
  pool.fill(1000, Format::int4, random, arena - 8192);
  pool.fill(17, Format::dense, random, std::uint64_t{5} << 30);
  pool.fill(999, Format::k8v4, random, (std::uint64_t{9} << 30) + 256);
  float q[64], out[64];
  for (float& x : q) x = std::normal_distribution<float>()(random);
  AttentionCall call;
  call.model = pool.model();
  call.pages = pool.source();
  call.batch = 1;
  call.block_tables = table;
  call.block_table_stride = 3;
  call.lengths = &length;
  call.query_starts = starts;
  call.q = q;
  call.q_type = call.out_type = Real::fp32;
  call.query_heads = 1;
  call.out = out;
  ASSERT_TRUE(attend(call));
  const std::vector<oracle::Row> expected = oracle::attend(call);
  for (int c = 0; c < 64; ++c) {
    EXPECT_NEAR(out[c], expected[0].out[c], output_bound(expected[0]));
  }
}

TEST(Attend, LayersOfDifferentShapeAndKeptDenseLayersWork) {
  std::mt19937_64 random(test_seed() + 10);
  PagePool pool(LayersProblem::geometry(), 4, 1 << 20);
  for (std::uint32_t id = 1; id < 4; ++id) pool.fill(id, Format::int4_k4, random);
  LayersProblem problem(random);
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    const AttentionCall call = problem.call(pool, layer);
    const std::uint32_t d = problem.g.layer[layer].head_dim;
    ASSERT_TRUE(attend(call));
    const std::vector<oracle::Row> expected = oracle::attend(call);
    for (std::size_t r = 0; r < expected.size(); ++r) {
      const double bound = output_bound(expected[r]);
      for (std::uint32_t c = 0; c < d; ++c) {
        ASSERT_NEAR(problem.out[r * d + c], expected[r].out[c], bound) << "layer " << layer;
      }
    }
  }
}

}  // namespace
}  // namespace kvq
