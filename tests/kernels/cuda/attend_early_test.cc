// What the launch in front of attention's still changes while attention looks at its first pages: on the host, where
// the moment between the two can be had.
//
// Invariant: results are those of what is there once the launch in front is over.
#include "gpu_fixture.h"
#include "tests/support/simt/simt.h"

namespace kvq {
namespace {

struct Early {
  explicit Early(std::uint64_t seed) : random(test_seed() + seed), problem(shape(), random), device(problem) {
    device.launch.max_query_tokens = 1;
  }
  ~Early() { simt::between_launches = nullptr; }

  static Shape shape() {
    Shape shape;
    shape.d = 128;
    shape.group = 4;
    shape.lengths = {640, 1024, 384};
    shape.queries = {1, 1, 1};
    shape.formats = {Format::int4};
    return shape;
  }
  // Runs with `change` made once every warp of the first block has had its early look.
  void check(const std::vector<oracle::Row>& expected, std::function<void()> change, const char* what) {
    simt::between_launches = [&] {
      change();
      changes += 1;
    };
    device.check(expected, what);
    EXPECT_EQ(changes, 1) << what;
  }

  std::mt19937_64 random;
  Problem problem;
  DeviceProblem device;
  int changes = 0;
};

TEST(DeviceAttendEarly, LengthsThatTheLaunchInFrontChangesAreTheOnesThatCount) {
  Early early(40);
  const std::vector<std::int32_t> before = {64, 1024, 384},
                                  lengths(early.problem.call().lengths, early.problem.call().lengths + 3);
  const std::vector<oracle::Row> expected = oracle::attend(early.problem.call());
  early.device.update_lengths(before);
  early.check(
      expected, [&] { early.device.update_lengths(lengths); }, "a length grows");
}

TEST(DeviceAttendEarly, ALengthBehindThoseThatAreReadAtOnceCountsToo) {
  std::mt19937_64 random(test_seed() + 44);
  Shape shape = Early::shape();
  shape.lengths.assign(200, 64);
  shape.queries.assign(200, 1);
  shape.lengths[170] = 640;
  Problem problem(shape, random);
  DeviceProblem device(problem);
  device.launch.max_query_tokens = 1;
  const std::vector<oracle::Row> expected = oracle::attend(problem.call());
  std::vector<std::int32_t> before = shape.lengths;
  before[170] = 64;
  device.update_lengths(before);
  simt::between_launches = [&] { device.update_lengths(shape.lengths); };
  device.check(expected, "the 171st length grows");
  simt::between_launches = nullptr;
}

TEST(DeviceAttendEarly, TablesThatTheLaunchInFrontChangesAreTheOnesThatCount) {
  Early early(41);
  const std::vector<oracle::Row> expected = oracle::attend(early.problem.call());
  std::vector<std::int32_t>& tables = early.problem.tables();
  const std::vector<std::int32_t> right = tables;
  tables[0] = tables[1];
  early.device.update_tables();
  early.check(
      expected,
      [&] {
        tables = right;
        early.device.update_tables();
      },
      "numbers of pages change");
}

TEST(DeviceAttendEarly, WhatIsWrongEarlyAndRightInTimeIsNoFault) {
  Early early(42);
  const std::vector<oracle::Row> expected = oracle::attend(early.problem.call());
  std::vector<std::int32_t>& tables = early.problem.tables();
  const std::vector<std::int32_t> right = tables;
  tables[2] = 0x7fffffff;  // of no page at all
  early.device.update_tables();
  const std::vector<std::int32_t> lengths(early.problem.call().lengths, early.problem.call().lengths + 3);
  early.device.update_lengths({1 << 30, -5, 0x7fffffff});  // nothing has been written there yet
  early.check(
      expected,
      [&] {
        tables = right;
        early.device.update_tables();
        early.device.update_lengths(lengths);
      },
      "what memory held before the first step");
}

TEST(DeviceAttendEarly, QueriesThatTheLaunchInFrontWritesAreTheOnesThatCount) {
  Early early(43);
  const std::vector<oracle::Row> expected = oracle::attend(early.problem.call());
  const AttentionCall call = early.device.device_call();
  const std::size_t bytes = early.problem.call().q_token_stride * 3 * DeviceProblem::element_bytes(call.q_type);
  std::vector<char> right(static_cast<const char*>(call.q), static_cast<const char*>(call.q) + bytes);
  std::memset(const_cast<void*>(call.q), 0xff, bytes);
  early.check(
      expected, [&] { std::memcpy(const_cast<void*>(call.q), right.data(), bytes); }, "queries");
}

}  // namespace
}  // namespace kvq
