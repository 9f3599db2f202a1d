// Append and merge on the device, beside their host twins on the same bytes.
#include "gpu_fixture.h"

namespace kvq {
namespace {

// A pool of open pages (page 2 is sealed), new tokens in any order and stride, and the same on the device.
struct AppendCase {
  PagePool pool;
  std::vector<std::uint16_t> k, v;
  std::vector<std::int64_t> slots;
  AppendCall call;
  FaultWord fault;

  AppendCase(const LayerSpec& spec, std::vector<std::int64_t> where, std::int64_t gap, std::mt19937_64& random)
      : pool(two_layers(spec), 6, 1 << 22), slots(std::move(where)) {
    for (std::uint32_t id = 1; id < 6; ++id) {
      std::byte* page = pool.place(id, Format::dense, id == 2 ? EntryState::sealed : EntryState::open);
      std::fill_n(page, pool.layout(Format::dense).page_bytes, std::byte{0xaa});
    }
    const auto tokens = static_cast<std::int64_t>(slots.size());
    call.layer = 1;
    call.dtype = spec.dtype;
    call.k_head_stride = spec.head_dim + gap;
    call.k_token_stride = call.k_head_stride * spec.kv_heads + gap;
    call.v_token_stride = spec.head_dim + gap;
    call.v_head_stride = call.v_token_stride * tokens;
    k.resize(call.k_token_stride * tokens);
    v.resize(call.v_head_stride * spec.kv_heads);
    for (std::uint16_t& x : k) x = static_cast<std::uint16_t>(random());
    for (std::uint16_t& x : v) x = static_cast<std::uint16_t>(random());
    call.model = pool.model();
    call.pages = pool.source();
    call.k = k.data();
    call.v = v.data();
    call.slots = slots.data();
    call.tokens = static_cast<std::uint32_t>(tokens);
  }
  static ModelGeometry two_layers(const LayerSpec& spec) {
    ModelGeometry g;
    g.layers = 2;
    g.layer[0] = {1, 64, Dtype::fp16, 0};
    g.layer[1] = spec;
    return g;
  }

  // Appends on the device and gives its arena back.
  std::vector<std::byte> run(const std::vector<std::int32_t>& aliases = {}) {
    DevicePool device(pool);
    DeviceBytes keys(k.data(), k.size() * 2), values(v.data(), v.size() * 2), where(slots.data(), slots.size() * 8);
    DeviceBytes list(aliases.data(), aliases.size() * 4);
    AppendCall there = call;
    there.pages = device.source();
    if (there.k != nullptr) there.k = keys.as<void>();
    if (there.v != nullptr) there.v = values.as<void>();
    there.slots = where.as<std::int64_t>();
    cuda::Launch launch;
    launch.fault = fault.device;
    if (!aliases.empty()) launch.aliases = list.as<std::int32_t>();
    launch.alias_count = static_cast<std::uint32_t>(aliases.size());
    const Result<void> done = cuda::append(there, launch);
    EXPECT_TRUE(done) << done.error().context;
    MUST(cudaDeviceSynchronize());
    std::vector<std::byte> arena(pool.arena_bytes());
    device.arena().read(arena.data(), arena.size());
    EXPECT_TRUE(device.arena().canary_lives());
    return arena;
  }
  bool as_host(const std::vector<std::byte>& arena) {
    return std::memcmp(arena.data(), pool.source().arena, arena.size()) == 0;
  }
};

TEST(DeviceAppend, WritesWhatTheHostWritesForAnyStridesAndNothingElse) {
  std::mt19937_64 random(test_seed() + 40);
  for (const std::uint32_t d : kHeadDims) {
    for (const std::int64_t gap : {0, 8, 3}) {  // the last: rows that are not aligned
      std::vector<std::int64_t> slots{64 + 5, kNoSlot, 3 * 64 + 63, 7, 2 * 64 + 1, 64 + 6};
      for (std::int64_t i = 0; i < 64; ++i) slots.push_back(4 * 64 + i);
      const LayerSpec spec{static_cast<std::uint16_t>(1 + random() % 8), static_cast<std::uint16_t>(d),
                           static_cast<Dtype>(random() % 2), 0};
      AppendCase a(spec, slots, gap, random);
      const std::vector<std::byte> arena = a.run();
      EXPECT_FALSE(a.as_host(arena));
      ASSERT_TRUE(append(a.call));
      EXPECT_TRUE(a.as_host(arena)) << "d " << d << " gap " << gap;
      EXPECT_EQ(a.fault.take(), 0u);
    }
  }
}

TEST(DeviceAppend, WritesWhatTheHostWritesForManyTokensInAnyOrder) {
  std::mt19937_64 random(test_seed() + 44);
  for (const std::uint32_t d : kHeadDims) {
    std::vector<std::int64_t> slots(300, kNoSlot);
    for (std::int64_t slot = 64; slot < 6 * 64; ++slot) slots.push_back(slot);  // those of page 2 are swallowed
    std::shuffle(slots.begin(), slots.end(), random);
    AppendCase a({static_cast<std::uint16_t>(1 + random() % 8), static_cast<std::uint16_t>(d), Dtype::fp16, 0}, slots,
                 static_cast<std::int64_t>(random() % 2), random);
    const std::vector<std::byte> arena = a.run();
    ASSERT_TRUE(append(a.call));
    EXPECT_TRUE(a.as_host(arena)) << "d " << d;
    EXPECT_EQ(a.fault.take(), 0u);
  }
}

TEST(DeviceAppend, KeysAndValuesMayComeSeparatelyAndSlotsMayBeAliases) {
  std::mt19937_64 random(test_seed() + 41);
  for (const bool keys : {true, false}) {
    AppendCase a({2, 80, Dtype::bf16, 0}, {64 + 9, 0 * 64 + 3, 7 * 64, 3 * 64 + 1}, 8, random);
    (keys ? a.call.v : a.call.k) = nullptr;
    const std::vector<std::byte> arena = a.run({5, 4, 1, 3});  // alias 7 is beyond the list
    a.slots = {4 * 64 + 9, 5 * 64 + 3, kNoSlot, 3 * 64 + 1};
    ASSERT_TRUE(append(a.call));
    EXPECT_TRUE(a.as_host(arena));
    EXPECT_EQ(a.fault.take(), 0u);
  }
}

TEST(DeviceAppend, AWrongSlotIsLeftOutAndReported) {
  std::mt19937_64 random(test_seed() + 42);
  const auto check = [&](std::int64_t slot, EntryState state, Format format, Errc code, std::uint32_t page) {
    AppendCase a({2, 64, Dtype::fp16, 0}, {64, slot, 65}, 0, random);
    const std::uint64_t good = a.pool.entry(3);
    a.pool.entry(3) = pack_entry({1, format, state, unpack_entry(good).offset_bytes});
    const std::vector<std::byte> arena = a.run();
    EXPECT_EQ(a.fault.take(), cuda::pack_fault(code, 1, 1, page));
    a.pool.entry(3) = good;
    a.slots[1] = kNoSlot;
    ASSERT_TRUE(append(a.call));
    EXPECT_TRUE(a.as_host(arena));
  };
  const EntryState open = EntryState::open;
  check(6 * 64, open, Format::dense, Errc::stale_id, 6);
  check(-2, open, Format::dense, Errc::invalid_argument, 0);
  check(std::int64_t{1} << 60, open, Format::dense, Errc::stale_id, 0);
  check(3 * 64, EntryState::free, Format::dense, Errc::stale_id, 3);
  check(3 * 64, EntryState::lost, Format::dense, Errc::lost_page, 3);
  check(3 * 64, EntryState::host, Format::dense, Errc::lost_page, 3);
  check(3 * 64, open, Format::int4, Errc::wrong_layout, 3);
  AppendCase wrong({2, 64, Dtype::fp16, 0}, {64}, 0, random);
  wrong.call.dtype = Dtype::bf16;
  cuda::Launch launch;
  launch.fault = wrong.fault.device;
  EXPECT_EQ(cuda::append(wrong.call, launch).error().code, Errc::wrong_layout);
  wrong.call.dtype = Dtype::fp16;
  launch.fault = nullptr;
  EXPECT_EQ(cuda::append(wrong.call, launch).error().code, Errc::invalid_argument);
}

TEST(DeviceMerge, JoinsStatesAsTheHostDoes) {
  std::mt19937_64 random(test_seed() + 43);
  std::normal_distribution<float> normal;
  const float empty = -std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::uint32_t d : {64u, 80u, 256u}) {
    const std::uint32_t rows = 1003;
    std::vector<float> a(rows * d), b(rows * d), la(rows), lb(rows);
    for (float& x : a) x = normal(random);
    for (float& x : b) x = normal(random);
    for (std::uint32_t r = 0; r < rows; ++r) {
      la[r] = r % 5 == 0 ? empty : 20 * normal(random);
      lb[r] = r % 3 == 0 ? empty : 20 * normal(random);
      for (std::uint32_t c = 0; c < d; ++c) {
        if (la[r] == empty) a[r * d + c] = nan;  // an empty state's output counts for nothing
        if (lb[r] == empty) b[r * d + c] = nan;
      }
    }
    DeviceBytes da(a.data(), a.size() * 4), db(b.data(), b.size() * 4), dla(la.data(), rows * 4),
        dlb(lb.data(), rows * 4);
    ASSERT_TRUE(cuda::merge_states(da.as<float>(), dla.as<float>(), db.as<float>(), dlb.as<float>(), rows, d, nullptr));
    MUST(cudaDeviceSynchronize());
    std::vector<float> got(rows * d), got_lse(rows);
    da.read(got.data(), got.size() * 4);
    dla.read(got_lse.data(), rows * 4);
    EXPECT_TRUE(da.canary_lives() && dla.canary_lives());
    merge_states(a.data(), la.data(), b.data(), lb.data(), rows, d);
    for (std::uint32_t r = 0; r < rows; ++r) {
      if (la[r] == empty) {
        EXPECT_EQ(got_lse[r], empty);
      } else {
        EXPECT_NEAR(got_lse[r], la[r], 0x1p-20 * std::max(1.0f, std::fabs(la[r])));
      }
      for (std::uint32_t c = 0; c < d; ++c) ASSERT_NEAR(got[r * d + c], a[r * d + c], 0x1p-18) << r;
    }
  }
}

}  // namespace
}  // namespace kvq
