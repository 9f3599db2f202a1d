// The device's attention against the double-precision oracle: every format, head size, group and feature, and random
// mixes of all.
//
// Invariant: each shape runs as decode (one row tile) and as many rows (wide tiles), since the hint may not change a
// result.
#include "gpu_fixture.h"

namespace kvq {
namespace {

void check_both(Problem& problem, const std::string& what) {
  const std::vector<oracle::Row> expected = oracle::attend(problem.call());
  DeviceProblem device(problem);
  for (const std::uint32_t hint : {1u, 0u}) {
    device.launch.max_query_tokens = hint;
    const double share = device.check(expected, what + (hint != 0 ? ", narrow" : ", wide"));
    if (std::getenv("KVQ_TEST_SHARE") != nullptr) std::printf("%s hint %u: share %.3f\n", what.c_str(), hint, share);
  }
}

TEST(DeviceAttend, EveryHeadSizeAndFormatMatchesTheOracle) {
  std::mt19937_64 random(test_seed());
  for (const std::uint32_t d : kHeadDims) {
    for (const Format f : kFormats) {
      for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
        Problem problem(shape_of_heads(d, f, dtype), random);
        check_both(problem, "d " + std::to_string(d) + " format " + std::to_string(index_of(f)) + " dtype " +
                                std::to_string(int(dtype)));
      }
    }
  }
}

TEST(DeviceAttend, EveryGroupSizeMatchesTheOracle) {
  std::mt19937_64 random(test_seed() + 1);
  for (std::uint32_t group = 1; group <= kMaxGroup; ++group) {
    Problem problem(shape_of_group(group), random);
    const std::vector<oracle::Row> expected = oracle::attend(problem.call());
    DeviceProblem device(problem);
    device.check(expected, "group, wide");
    device.launch.max_query_tokens = 1;
    device.check(expected, "group, hint too small");
  }
}

TEST(DeviceAttend, LengthsAroundPagesMixWithManyQueryTokensInOneCall) {
  std::mt19937_64 random(test_seed() + 2);
  for (const Real out : {Real::fp16, Real::bf16, Real::fp32}) {
    for (const std::uint32_t d : {80u, 128u}) {
      Problem problem(shape_around_pages(d, out), random);
      check_both(problem, "lengths around pages");
      problem.call().window = std::numeric_limits<std::int32_t>::max();
      check_both(problem, "a window without end");
    }
  }
}

TEST(DeviceAttend, MoreSequencesThanAreReadAtOnceMatchTheOracle) {
  std::mt19937_64 random(test_seed() + 3);
  for (const std::size_t sequences :
       {std::size_t{32}, std::size_t{33}, std::size_t{128}, std::size_t{129}, std::size_t{300}}) {
    Shape shape;
    shape.d = 64;
    shape.group = 2;
    shape.formats = kAllFormats;
    for (std::size_t s = 0; s < sequences; ++s) {
      shape.lengths.push_back(static_cast<std::int32_t>(random() % 4 == 0 ? 0 : random() % 200));
      shape.queries.push_back(shape.lengths.back() == 0 || random() % 8 == 0 ? 0 : 1);
    }
    shape.lengths.back() = 500;  // the last one counts
    shape.queries.back() = 1;
    Problem problem(shape, random);
    check_both(problem, std::to_string(sequences) + " sequences");
  }
}

TEST(DeviceAttend, WindowEdgesInsideSealedPagesSkipPagesAndMaskTokens) {
  std::mt19937_64 random(test_seed() + 3);
  Shape shape;
  shape.d = 96;
  shape.group = 7;
  shape.lengths = {500, 321};
  shape.queries = {5, 70};
  shape.formats = kAllFormats;
  Problem problem(shape, random);
  for (const bool causal : {true, false}) {
    for (const int window : {1, 2, 63, 64, 65, 100, 129, 1000}) {
      problem.call().causal = causal;
      problem.call().window = window;
      check_both(problem, "window " + std::to_string(window) + (causal ? " causal" : ""));
    }
  }
  // Pages that no row sees may have any id in the table.
  problem.call().window = 100;
  problem.call().causal = true;
  const std::vector<oracle::Row> expected = oracle::attend(problem.call());
  problem.tables()[0] = 1 << 30;
  DeviceProblem device(problem);
  device.check(expected, "skipped page");
}

TEST(DeviceAttend, SoftcapWindowSinkAndAlibiMatchTheOracle) {
  std::mt19937_64 random(test_seed() + 4);
  const float sinks[8] = {0, 1.5f, -3, 20, -20, 0.25f, -std::numeric_limits<float>::infinity(), 5};
  const float slopes[8] = {0.5f, 0.0625f, 0, 0.00390625f, 1, 0.25f, 0.125f, 0.03125f};
  for (const std::uint32_t d : {64u, 128u, 256u}) {
    Shape shape;
    shape.d = d;
    shape.kv_heads = 2;
    shape.group = 4;
    shape.dtype = d == 128 ? Dtype::bf16 : Dtype::fp16;
    shape.lengths = {300, 0, 40, 777};
    shape.queries = {9, 1, 1, 1};
    shape.formats = kAllFormats;
    Problem problem(shape, random);
    problem.call().sinks = sinks;
    check_both(problem, "sink");
    problem.call().softcap = 5;
    problem.call().window = 90;
    problem.call().scale = 0.31f;
    check_both(problem, "softcap, window, sink");
    problem.call().softcap = 0;
    problem.call().alibi = slopes;
    check_both(problem, "alibi, window, sink");
    problem.call().window = -1;
    for (const bool causal : {true, false}) {
      problem.call().causal = causal;
      check_both(problem, "alibi");
    }
  }
}

TEST(DeviceAttend, LargeLogitsNeitherOverflowNorVanish) {
  std::mt19937_64 random(test_seed() + 6);
  for (const Format f : kFormats) {
    Shape shape;
    shape.d = 128;
    shape.group = 2;
    shape.q_type = Real::fp32;
    shape.lengths = {256};
    shape.queries = {2};
    shape.formats = {f};
    Problem problem(shape, random);
    for (const float scale :
         {1e-4f, 30.0f, -30.0f, 3000.0f}) {  // the last: logits near 1e5, beyond any finite sentinel
      problem.call().scale = scale;
      check_both(problem, "scale");
    }
  }
}

TEST(DeviceAttend, ALongContextKeepsItsSmallWeights) {
  std::mt19937_64 random(test_seed() + 7);
  for (const Format f : {Format::dense, Format::int4}) {
    Shape shape;
    shape.d = 64;
    shape.group = 2;
    shape.lengths = {60000};
    shape.queries = {1};
    shape.formats = {f};
    Problem problem(shape, random);
    for (const float scale : {0.0f, 1e-3f}) {  // the last: every key weighs about the same
      problem.call().scale = scale;
      check_both(problem, "long context");
    }
  }
}

TEST(DeviceAttend, RandomMixesOfEverythingMatchTheOracle) {
  std::mt19937_64 random(test_seed() + 8);
  const auto draw = [&](int low, int high) { return low + int(random() % std::uint64_t(high - low + 1)); };
  double worst = 0;
  for (int i = 0; i < 240; ++i) {
    Shape shape;
    shape.d = kHeadDims[draw(0, 5)];
    shape.kv_heads = draw(1, 3);
    shape.group = draw(1, 16);
    shape.dtype = static_cast<Dtype>(draw(0, 1));
    shape.q_type = static_cast<Real>(draw(0, 2));
    shape.out_type = static_cast<Real>(draw(0, 2));
    for (int s = draw(1, 5); s > 0; --s) {
      shape.lengths.push_back(draw(0, 3) == 0 ? draw(0, 70) : draw(1, 400));
      shape.queries.push_back(draw(0, 2) == 0 ? draw(0, 20) : 1);
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
    const std::vector<oracle::Row> expected = oracle::attend(call);
    DeviceProblem device(problem);
    device.launch.max_query_tokens = static_cast<std::uint32_t>(draw(0, 2));
    worst = std::max(worst, device.check(expected, "random mix " + std::to_string(i)));
    if (HasFailure()) {
      ADD_FAILURE() << "d " << shape.d << " heads " << shape.kv_heads << " x " << shape.group << " dtype "
                    << int(shape.dtype) << " q " << int(shape.q_type) << " hint " << device.launch.max_query_tokens
                    << " causal " << call.causal << " window " << call.window << " softcap " << call.softcap
                    << " alibi " << (call.alibi != nullptr) << " scale " << call.scale;
      break;
    }
  }
  std::printf("largest share of its bound that a random mix used: %.3f\n", worst);
}

}  // namespace
}  // namespace kvq
