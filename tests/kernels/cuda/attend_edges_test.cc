// The device's attention where something is odd: NaN, values beyond fp16, faults, graphs, aliases, far offsets, wrong
// arguments.
#include "gpu_fixture.h"

namespace kvq {
namespace {

std::uint16_t* block_of(Problem& problem, std::uint32_t page) {
  const Entry entry = unpack_entry(problem.pool().entry(page));
  return reinterpret_cast<std::uint16_t*>(problem.pool().source().arena + entry.offset_bytes);
}

TEST(DeviceAttend, NanInAVisibleKeyReachesItsRowsAndNoOthers) {
  std::mt19937_64 random(test_seed() + 20);
  for (const std::uint32_t hint : {2u, 0u}) {
    Shape shape;
    shape.lengths = {128};
    shape.queries = {2};
    shape.group = 2;
    Problem problem(shape, random);
    block_of(problem, 2)[dense_index(63, 5, 64)] = 0x7e00;  // seen by the last query token only
    DeviceProblem device(problem);
    device.launch.max_query_tokens = hint;
    ASSERT_TRUE(device.run());
    for (std::uint32_t head = 0; head < 2; ++head) {
      for (std::uint32_t c = 0; c < 64; ++c) {
        EXPECT_TRUE(std::isfinite(device.output(head, c)));
        EXPECT_TRUE(std::isnan(device.output(2 + head, c)));
      }
      EXPECT_TRUE(std::isnan(device.lse[2 + head]));
    }
  }
}

TEST(DeviceAttend, NanInAVisibleValueReachesItsChannel) {
  std::mt19937_64 random(test_seed() + 21);
  for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
    Shape shape;
    shape.dtype = dtype;
    shape.lengths = {700};
    shape.queries = {1};
    Problem problem(shape, random);
    block_of(problem, 4)[64 * 64 + dense_index(17, 9, 64)] = 0x7fff;
    DeviceProblem device(problem);
    device.launch.max_query_tokens = 1;
    ASSERT_TRUE(device.run());
    EXPECT_TRUE(std::isnan(device.output(0, 9)));
    EXPECT_TRUE(std::isfinite(device.output(0, 8)));
  }
}

TEST(DeviceAttend, AQueryThatIsNotFiniteGivesNanInItsRowOnly) {
  std::mt19937_64 random(test_seed() + 22);
  for (const Format f : kFormats) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Shape shape;
      shape.lengths = {192};
      shape.queries = {1};
      shape.group = 4;
      shape.q_type = Real::fp32;
      shape.formats = {f};
      Problem problem(shape, random);
      auto* q = const_cast<float*>(static_cast<const float*>(problem.call().q));
      q[1 * problem.call().q_head_stride + 3] = bad;
      DeviceProblem device(problem);
      device.launch.max_query_tokens = 1;
      ASSERT_TRUE(device.run());
      EXPECT_TRUE(std::isnan(device.output(1, 0))) << "format " << index_of(f);
      EXPECT_TRUE(std::isfinite(device.output(0, 0)));
      EXPECT_TRUE(std::isfinite(device.output(2, 0)));
    }
  }
}

TEST(DeviceAttend, Bf16BeyondTheRangeOfFp16IsExactOnDensePages) {
  std::mt19937_64 random(test_seed() + 23);
  for (const Real q_type : {Real::bf16, Real::fp32}) {
    Shape shape;
    shape.d = 128;
    shape.dtype = Dtype::bf16;
    shape.q_type = q_type;
    shape.group = 4;
    shape.lengths = {300};
    shape.queries = {1};
    Problem problem(shape, random);
    for (std::uint32_t page = 1; page <= 4; ++page) {  // of 300 tokens; the last one is full of NaN behind its end
      for (std::uint32_t i = 0; i < 2 * 64 * 128; ++i) {
        std::uint16_t& x = block_of(problem, page)[i];
        if (x != 0xffff && (x & 0x7f80) != 0) x = static_cast<std::uint16_t>(x + (20 << 7));  // times 2^20
      }
    }
    problem.call().scale = 0x1p-23f;
    DeviceProblem device(problem);
    device.launch.max_query_tokens = 1;
    device.check(oracle::attend(problem.call()), "bf16 range");
  }
}

TEST(DeviceAttend, KeptChannelsThatAPageDoesNotUseDoNotCount) {
  std::mt19937_64 random(test_seed() + 29);
  for (const Format f : {Format::int4_k4, Format::int4_k8}) {
    for (const std::uint32_t unused : {0u, 1u, kept_channels(f) - 1, kept_channels(f)}) {  // the first ones
      Shape shape;
      shape.d = 128;
      shape.group = 3;
      shape.lengths = {192};
      shape.queries = {1};
      shape.formats = {f};
      Problem problem(shape, random);
      const BlockOffsets at = block_offsets(f, shape.d);
      for (std::uint32_t page = 1; page <= 3; ++page) {
        std::fill_n(block_of(problem, page) + at.channels / 2, unused, kNoChannel);
        std::fill_n(block_of(problem, page) + at.kept / 2, unused * kPageTokens, std::uint16_t{0x7e00});  // NaN
      }
      const std::vector<oracle::Row> expected = oracle::attend(problem.call());
      DeviceProblem device(problem);
      for (const std::uint32_t hint : {1u, 0u}) {
        device.launch.max_query_tokens = hint;
        device.check(expected, std::to_string(unused) + " of " + std::to_string(kept_channels(f)) + " unused");
      }
    }
  }
}

TEST(DeviceAttend, LargeAndTinyOperandsOfQuantizedPagesStayInRange) {
  std::mt19937_64 random(test_seed() + 24);
  for (const Format f : {Format::int4, Format::int4_k8, Format::k8v4}) {
    for (const int shift : {-12, 12}) {  // of keys and values; queries the other way
      Shape shape;
      shape.d = 128;
      shape.q_type = Real::fp32;
      shape.group = 2;
      shape.lengths = {256};
      shape.queries = {1};
      Problem problem(shape, random);
      const PageLayout& dense = problem.pool().layout(Format::dense);
      for (std::uint32_t page = 1; page <= 4; ++page) {
        Bytes scaled(dense.page_bytes);
        for (std::uint32_t i = 0; i < 2 * 64 * 128; ++i) {
          const float x = half_to_float(block_of(problem, page)[i]);
          scaled.halves()[i] = float_to_half(std::clamp(std::ldexp(x, shift), -6e4f, 6e4f));  // or the page stays dense
        }
        std::byte* out =
            problem.pool().place(page, f, EntryState::sealed, unpack_entry(problem.pool().entry(page)).offset_bytes);
        ASSERT_TRUE(transcode_page(*problem.call().model.geometry, dense, scaled.data, problem.pool().layout(f), out));
      }
      auto* q = const_cast<float*>(static_cast<const float*>(problem.call().q));
      for (std::uint32_t i = 0; i < 2 * problem.call().q_head_stride; ++i) q[i] = std::ldexp(q[i], 10 - shift);
      problem.call().scale = 0x1p-13f;
      DeviceProblem device(problem);
      device.launch.max_query_tokens = 1;
      device.check(oracle::attend(problem.call()), "range, shift " + std::to_string(shift));
    }
  }
}

TEST(DeviceAttend, EveryFaultIsReportedOnceAndCostsOnlyItsRows) {
  std::mt19937_64 random(test_seed() + 25);
  Shape shape;
  shape.lengths = {128, 192};
  shape.queries = {1, 1};
  shape.group = 2;
  shape.formats = kAllFormats;
  Problem problem(shape, random);
  const std::vector<oracle::Row> expected = oracle::attend(problem.call());
  DeviceProblem device(problem);
  device.launch.max_query_tokens = 1;
  const std::int64_t stride = problem.call().block_table_stride;
  const auto faults = [&](Errc code, std::uint32_t page) {
    EXPECT_TRUE(device.run());
    EXPECT_EQ(device.fault.take(), cuda::pack_fault(code, 0, 1, page)) << "code " << int(code);
    for (std::size_t row = 2; row < 4; ++row) {
      EXPECT_TRUE(std::isnan(device.output(row, 0)) && std::isnan(device.output(row, 63)) &&
                  std::isnan(device.lse[row]));
    }
    device.compare(expected, "the other sequence", 0);
  };
  const std::uint64_t good = problem.pool().entry(4);
  const auto with_entry = [&](EntryState state, Format format, Errc code) {
    problem.pool().entry(4) = pack_entry({1, format, state, unpack_entry(good).offset_bytes});
    device.pool.update_entries();
    faults(code, 4);
    problem.pool().entry(4) = good;
    device.pool.update_entries();
  };
  with_entry(EntryState::free, Format::dense, Errc::stale_id);
  with_entry(EntryState::lost, Format::dense, Errc::lost_page);
  with_entry(EntryState::host, Format::int4, Errc::lost_page);
  with_entry(EntryState::sealed, static_cast<Format>(9), Errc::wrong_layout);
  with_entry(EntryState::sealed, Format::none, Errc::wrong_layout);
  for (const std::int32_t id : {6, -1, 1 << 30}) {
    problem.tables()[stride + 1] = id;
    device.update_tables();
    faults(Errc::stale_id, static_cast<std::uint32_t>(id));
  }
  problem.tables()[stride + 1] = 4;
  device.update_tables();
  device.check(expected, "after the faults");
  device.update_lengths({128, 64 * static_cast<std::int32_t>(stride) + 1});  // a length that its table does not hold
  EXPECT_TRUE(device.run());
  EXPECT_NE(device.fault.take(), 0u);
  EXPECT_TRUE(std::isnan(device.output(2, 0)));
  // The first fault stays.
  device.update_lengths({128, 192});
  problem.tables()[stride + 1] = 6;
  device.update_tables();
  EXPECT_TRUE(device.run());
  problem.tables()[stride + 1] = -1;
  device.update_tables();
  EXPECT_TRUE(device.run());
  EXPECT_EQ(device.fault.take(), cuda::pack_fault(Errc::stale_id, 0, 1, 6));
}

TEST(DeviceAttend, ACapturedCallFollowsLengthsTablesAndEntries) {
  std::mt19937_64 random(test_seed() + 26);
  for (const bool wide : {false, true}) {
    Shape shape;
    shape.d = 128;
    shape.kv_heads = 2;
    shape.group = 4;
    shape.lengths = {1000, 64, 333};
    shape.queries = {1, 1, 1};
    shape.formats = kAllFormats;
    Problem problem(shape, random);
    DeviceProblem device(problem);
    device.launch.max_query_tokens = wide ? 0 : 1;
    check_replays(problem, device, {{1000, 64, 333}, {1, 0, 1}, {960, 10, 64}, {0, 0, 0}, {65, 64, 320}});
  }
}

TEST(DeviceAttend, CallsBehindOneAnotherShareOneWorkspace) {
  std::mt19937_64 random(test_seed() + 30);
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<std::unique_ptr<DeviceProblem>> devices;
  for (const std::uint32_t d : {128u, 64u, 256u}) {
    Shape shape;
    shape.d = d;
    shape.kv_heads = 2;
    shape.group = 4;
    shape.lengths = {1500, 700, 20};
    shape.queries = {1, 1, 1};
    shape.formats = kAllFormats;
    problems.push_back(std::make_unique<Problem>(shape, random));
    devices.push_back(std::make_unique<DeviceProblem>(*problems.back()));
    devices.back()->launch.max_query_tokens = 1;
    devices.back()->poison();
  }
  DeviceBytes workspace(devices[2]->launch.workspace_bytes);  // the largest head size needs most
  for (int i = 0; i < 30; ++i) {
    for (const auto& device : devices) {
      device->launch.workspace = workspace.as<void>();
      device->launch.workspace_bytes = workspace.size();
      ASSERT_TRUE(cuda::attend(device->device_call(), device->launch));
    }
  }
  for (std::size_t i = 0; i < devices.size(); ++i) {
    devices[i]->collect();
    devices[i]->compare(oracle::attend(problems[i]->call()), "call " + std::to_string(i));
    EXPECT_EQ(devices[i]->fault.take(), 0u);
  }
  EXPECT_TRUE(workspace.canary_lives());
}

TEST(DeviceAttend, AliasesStandForPagesAndBeyondThemIsTheNullPage) {
  std::mt19937_64 random(test_seed() + 27);
  Shape shape;
  shape.lengths = {256, 128};
  shape.queries = {1, 3};
  shape.group = 3;
  shape.formats = kAllFormats;
  Problem problem(shape, random);
  std::vector<std::int32_t> ids = problem.tables(), aliases(ids.size(), 0);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] > 0) aliases[ids.size() - 1 - i] = ids[i];
  }
  problem.tables()[2] = 0;  // what the oracle is to see for an alias beyond the list
  const std::vector<oracle::Row> expected = oracle::attend(problem.call());
  for (std::size_t i = 0; i < ids.size(); ++i) problem.tables()[i] = static_cast<std::int32_t>(ids.size() - 1 - i);
  problem.tables()[2] = static_cast<std::int32_t>(ids.size());
  DeviceProblem device(problem);
  DeviceBytes list(aliases.data(), aliases.size() * 4);
  device.launch.aliases = list.as<std::int32_t>();
  device.launch.alias_count = static_cast<std::uint32_t>(aliases.size());
  device.launch.max_query_tokens = 1;
  device.check(expected, "aliases");
}

TEST(DeviceAttend, PagesBeyondFourGigabytesAndLayersOfAnyShapeAreReached) {
  std::mt19937_64 random(test_seed() + 28);
  const std::uint64_t arena_bytes = std::uint64_t{9} << 30;
  PagePool pool(LayersProblem::geometry(), 4, arena_bytes);
  const std::uint64_t places[3] = {arena_bytes - (1 << 20), std::uint64_t{5} << 30, (std::uint64_t{8} << 30) + 256};
  DeviceBytes arena(arena_bytes);
  for (std::uint32_t id = 1; id < 4; ++id) {
    pool.fill(id, Format::int4_k4, random, places[id - 1]);
    arena.write(pool.source().arena + places[id - 1], pool.layout(Format::int4_k4).page_bytes, places[id - 1]);
  }
  LayersProblem problem(random);
  const std::size_t bytes = problem.q.size() * 4;
  DeviceBytes entries(pool.source().entries, 4 * 8), tables(problem.table, 12), lengths(&problem.length, 4);
  DeviceBytes query_starts(problem.starts, 8), queries(problem.q.data(), bytes), outputs(bytes),
      workspace(*cuda::workspace_bytes(pool.model(), 6));
  FaultWord fault;
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    const AttentionCall on_host = problem.call(pool, layer);
    const std::vector<oracle::Row> expected = oracle::attend(on_host);
    AttentionCall call = on_host;
    call.pages = {entries.as<const DirectoryEntry>(), 4, arena.as<std::byte>()};
    call.block_tables = tables.as<std::int32_t>();
    call.lengths = lengths.as<std::int32_t>();
    call.query_starts = query_starts.as<std::int32_t>();
    call.q = queries.as<void>();
    call.out = outputs.as<void>();
    cuda::Launch launch;
    launch.fault = fault.device;
    launch.workspace = workspace.as<void>();
    launch.workspace_bytes = workspace.size();
    launch.max_query_tokens = 1;
    ASSERT_TRUE(cuda::attend(call, launch));
    MUST(cudaDeviceSynchronize());
    outputs.read(problem.out.data(), bytes);
    for (std::size_t r = 0; r < expected.size(); ++r) {
      const std::uint32_t d = problem.g.layer[layer].head_dim;
      for (std::uint32_t c = 0; c < d; ++c) {
        ASSERT_NEAR(problem.out[r * d + c], expected[r].out[c], device_bound(expected[r], on_host)) << layer;
      }
    }
  }
  EXPECT_EQ(fault.take(), 0u);
}

TEST(DeviceAttend, EveryWrongArgumentIsNamed) {
  std::mt19937_64 random(test_seed() + 29);
  Shape shape;
  shape.lengths = {128};
  shape.queries = {1};
  shape.group = 2;
  Problem problem(shape, random);
  DeviceProblem device(problem);
  const AttentionCall good = device.device_call();
  const auto refused = [&](auto change) {
    AttentionCall call = good;
    cuda::Launch launch = device.launch;
    change(call, launch);
    const Result<void> result = cuda::attend(call, launch);
    EXPECT_NE(result.error().context[0], '\0');
    return result.error().code;
  };
  using Call = AttentionCall;
  using Launch = cuda::Launch;
  const auto invalid = Errc::invalid_argument;
  EXPECT_EQ(refused([](Call& c, Launch&) { c.model.layouts = nullptr; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.layer = 1; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.query_heads = 0; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.query_heads = 17; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.q_type = static_cast<Real>(3); }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.out_type = static_cast<Real>(7); }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.scale = NAN; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.softcap = -1; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.window = 0; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.q = nullptr; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.out = nullptr; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.block_tables = nullptr; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.lengths = nullptr; }), invalid);
  EXPECT_EQ(refused([](Call& c, Launch&) { c.pages.arena += 64; }), invalid);
  EXPECT_EQ(refused([](Call&, Launch& l) { l.fault = nullptr; }), invalid);
  EXPECT_EQ(refused([](Call&, Launch& l) { l.workspace = nullptr; }), invalid);
  EXPECT_EQ(refused([](Call&, Launch& l) { --l.workspace_bytes; }), invalid);
  EXPECT_EQ(refused([](Call&, Launch& l) { l.workspace = static_cast<char*>(l.workspace) + 16; }), invalid);
  ModelGeometry odd = *good.model.geometry;
  odd.layer[0].head_dim = 112;
  EXPECT_EQ(refused([&](Call& c, Launch&) { c.model.geometry = &odd; }), Errc::wrong_layout);
  EXPECT_EQ(cuda::workspace_bytes({&odd, good.model.layouts}, 2).error().code, Errc::wrong_layout);
  EXPECT_TRUE(cuda::check_device());
  AttentionCall none = good;
  none.batch = 0;
  EXPECT_TRUE(cuda::attend(none, device.launch));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace kvq
