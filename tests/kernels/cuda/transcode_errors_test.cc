// What the CUDA transcoder refuses: bad pages one by one, bad calls as a whole.
#include "kernels/int4_codec.h"
#include "tests/kernels/cuda/transcode_fixture.h"

namespace kvq {
namespace {

TEST_F(GpuTranscode, RefusesAPageWithBadValuesAndNoOther) {
  std::mt19937_64 random(test_seed() + 10);
  for (int round = 0; round < 40; ++round) {
    const Dtype dtype = round % 2 == 0 ? Dtype::fp16 : Dtype::bf16;
    const std::uint32_t d = kHeadDims[random() % 6];
    const Format f = round % 3 == 0 ? Format::int4_k8 : round % 3 == 1 ? Format::int4 : Format::k8v4;
    const ModelGeometry g = uniform(2, 2, d, dtype);
    const PageLayout dense = make_layout(g, Format::dense), to = make_layout(g, f);
    std::vector<Content> pages;
    for (int i = 0; i < 3; ++i) pages.push_back(dense_page(g, dense, Fill::normal, random));
    const std::uint16_t bad[] = {infinity_bits(dtype), static_cast<std::uint16_t>(infinity_bits(dtype) + 1), 0x7fff,
                                 0x7fc0,
                                 static_cast<std::uint16_t>(dtype == Dtype::fp16 ? 0x7e00 : largest_bits(dtype) + 1)};
    const std::uint16_t sign = random() % 2 != 0 ? 0x8000 : 0;
    auto* elements = reinterpret_cast<std::uint16_t*>(pages[1].data());
    elements[random() % (pages[1].size() / 2)] = sign | bad[random() % 5];
    // The largest finite value is no reason to refuse.
    reinterpret_cast<std::uint16_t*>(pages[2].data())[random() % (pages[2].size() / 2)] = sign | largest_bits(dtype);

    Slots in(3, dense.page_bytes), out(3, to.page_bytes);
    std::vector<cuda::PageJob> jobs;
    for (std::size_t i = 0; i < 3; ++i) {
      in.put(i, pages[i]);
      jobs.push_back({in.at(i), out.at(i), 0, false});
    }
    const std::vector<cuda::PageJobDone> done = run(g, dense, &to, jobs);
    ASSERT_EQ(done[0].code, Errc::ok);
    ASSERT_EQ(done[1].code, Errc::invalid_argument) << "d " << d << " round " << round;
    ASSERT_EQ(done[2].code, Errc::ok);
    ASSERT_TRUE(host_transcode(g, dense, pages[1], to).empty());
    for (const std::size_t i : {0u, 2u}) ASSERT_TRUE(out.get(i) == host_transcode(g, dense, pages[i], to)) << i;
    ASSERT_TRUE(out.gaps_intact());
  }
}

TEST_F(GpuTranscode, CopiesBadValuesOfLayersThatKeepDense) {
  std::mt19937_64 random(test_seed() + 11);
  ModelGeometry g = uniform(2, 1, 128, Dtype::fp16);
  g.layer[1].keep_dense = 1;
  const PageLayout dense = make_layout(g, Format::dense);
  Content page = dense_page(g, dense, Fill::normal, random);
  reinterpret_cast<std::uint16_t*>(page.data() + dense.layer[1].offset_bytes)[77] = 0x7c00;
  expect_as_host(g, dense, make_layout(g, Format::int4), {page});
  expect_as_host(g, dense, dense, {page});
}

TEST_F(GpuTranscode, ReportsASourceThatIsNotWhatItsChecksumSays) {
  std::mt19937_64 random(test_seed() + 12);
  const ModelGeometry g = odd_geometry(3, 3, random);
  const PageLayout dense = make_layout(g, Format::dense), int4 = make_layout(g, Format::int4);
  std::vector<Content> pages;
  for (int i = 0; i < 4; ++i) pages.push_back(dense_page(g, dense, Fill::normal, random));
  Slots in(4, dense.page_bytes), out(4, int4.page_bytes);
  std::vector<cuda::PageJob> jobs;
  for (std::size_t i = 0; i < 4; ++i) jobs.push_back({in.at(i), out.at(i), sum_of(pages[i]), i != 3});
  pages[1][random() % pages[1].size()] ^= std::byte{4};  // one flipped bit
  // Damage that is also not finite is damage.
  std::fill_n(reinterpret_cast<std::uint16_t*>(pages[2].data()), 8, std::uint16_t{0x7fff});
  pages[3][random() % pages[3].size()] ^= std::byte{1};  // nobody knows its checksum
  for (std::size_t i = 0; i < 4; ++i) in.put(i, pages[i]);
  for (const PageLayout* to : {&int4, static_cast<const PageLayout*>(nullptr)}) {
    const std::vector<cuda::PageJobDone> done = run(g, dense, to, jobs);
    EXPECT_EQ(done[0].code, Errc::ok);
    EXPECT_EQ(done[1].code, Errc::lost_page);
    EXPECT_EQ(done[2].code, Errc::lost_page);
    EXPECT_EQ(done[3].code, Errc::ok);
  }
  EXPECT_TRUE(out.get(0) == host_transcode(g, dense, pages[0], int4));
}

TEST_F(GpuTranscode, CountsPaddingOfTheSourceAndZeroesThatOfTheDestination) {
  std::mt19937_64 random(test_seed() + 13);
  const ModelGeometry g = uniform(1, 1, 80, Dtype::fp16);
  const PageLayout dense = make_layout(g, Format::dense), int4 = make_layout(g, Format::int4);
  ASSERT_EQ(int4.page_bytes - int4.layer[0].head_bytes, 128u);
  Content packed = expect_as_host(g, dense, int4, {dense_page(g, dense, Fill::normal, random)})[0];
  for (std::uint64_t i = int4.layer[0].head_bytes; i < packed.size(); ++i) packed[i] = static_cast<std::byte>(random());
  expect_as_host(g, int4, int4, {packed});  // the checksum of the source holds with the bytes in its padding
  expect_as_host(g, int4, dense, {packed});
}

TEST_F(GpuTranscode, DecodesADamagedChannelListInsideItsBlock) {
  std::mt19937_64 random(test_seed() + 14);
  const ModelGeometry g = uniform(1, 2, 96, Dtype::bf16);
  const PageLayout dense = make_layout(g, Format::dense), k8 = make_layout(g, Format::int4_k8);
  Content packed = expect_as_host(g, dense, k8, {dense_page(g, dense, Fill::normal, random)})[0];
  const BlockOffsets at = block_offsets(Format::int4_k8, 96);
  for (const std::uint16_t channel : {96, 97, 0x7fff, 0xfffe, 0xffff}) {
    std::memcpy(packed.data() + at.channels + 4, &channel, 2);
    expect_as_host(g, k8, dense, {packed});
  }
}

TEST_F(GpuTranscode, KeepsSeveralBatchesInFlightApart) {
  // They overlap: far more of them than the GPU has room for at once, small and large ones, tickets taken again at
  // once.
  std::mt19937_64 random(test_seed() + 15);
  const ModelGeometry g = uniform(4, 2, 128, Dtype::bf16);
  const PageLayout dense = make_layout(g, Format::dense), int4 = make_layout(g, Format::int4);
  const Content page = dense_page(g, dense, Fill::normal, random);
  const Content packed = host_transcode(g, dense, page, int4);
  constexpr std::uint32_t kSlots = 64;
  Slots wide(1, dense.page_bytes), narrow(kSlots, int4.page_bytes), back(kSlots, dense.page_bytes);
  wide.put(0, page);
  struct Running {
    std::uint32_t ticket;
    std::size_t jobs;
    std::uint64_t sum;
  };
  std::vector<Running> running;
  const auto take_first = [&] {
    for (const cuda::PageJobDone& done : finish(running.front().ticket, running.front().jobs)) {
      ASSERT_EQ(done.code, Errc::ok);
      ASSERT_EQ(done.checksum, running.front().sum);
    }
    running.erase(running.begin());
  };
  for (int round = 0; round < 300 && !HasFailure(); ++round) {
    if (running.size() == kBatches) {
      EXPECT_EQ(transcoder_->launch(g, dense, nullptr, {}).error().code, Errc::limit_reached);
      take_first();
    }
    const std::uint32_t kind = round % 3, pages = round % 8 < 3 ? kSlots : 1 + random() % 3;
    std::vector<cuda::PageJob> jobs;  // all batches write the same bytes
    for (std::uint32_t i = 0; i < pages; ++i) {
      jobs.push_back({wide.at(0), kind == 0 ? narrow.at(i) : back.at(i), sum_of(page), true});
    }
    const auto ticket = transcoder_->launch(g, dense, kind == 0 ? &int4 : kind == 1 ? &dense : nullptr, jobs);
    ASSERT_TRUE(ticket);
    running.push_back({*ticket, jobs.size(), kind == 0 ? sum_of(packed) : sum_of(page)});
  }
  while (!running.empty()) take_first();
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    ASSERT_TRUE(narrow.get(i) == packed) << i;
    ASSERT_TRUE(back.get(i) == page) << i;
  }
  EXPECT_TRUE(narrow.gaps_intact() && back.gaps_intact());
  const auto again = transcoder_->launch(g, dense, nullptr, {});  // an empty batch
  ASSERT_TRUE(again);
  EXPECT_TRUE(finish(*again, 0).empty());
}

TEST_F(GpuTranscode, IsDoneOnlyWhenItsPagesAreThere) {
  // What follows a result may use the page at once: there, a copy of that, and back, each begun when the one before has
  // reported, though its kernel may not have ended.
  std::mt19937_64 random(test_seed() + 16);
  const ModelGeometry g = uniform(8, 4, 128, Dtype::fp16);
  const PageLayout dense = make_layout(g, Format::dense), int4 = make_layout(g, Format::int4);
  Slots wide(2, dense.page_bytes), narrow(2, int4.page_bytes);
  for (int round = 0; round < 20; ++round) {
    const Content page = dense_page(g, dense, Fill::normal, random);
    const Content packed = host_transcode(g, dense, page, int4), decoded = host_transcode(g, int4, packed, dense);
    wide.put(0, page);
    EXPECT_EQ(run(g, dense, &int4, {{wide.at(0), narrow.at(0)}})[0].checksum, sum_of(packed));
    EXPECT_EQ(run(g, int4, &int4, {{narrow.at(0), narrow.at(1), sum_of(packed), true}})[0].code, Errc::ok);
    EXPECT_EQ(run(g, int4, &dense, {{narrow.at(1), wide.at(1), 1, true}})[0].code, Errc::lost_page);
    EXPECT_EQ(run(g, int4, &dense, {{narrow.at(1), wide.at(1), sum_of(packed), true}})[0].checksum, sum_of(decoded));
    ASSERT_TRUE(wide.get(1) == decoded) << round;
  }
}

TEST_F(GpuTranscode, RefusesCallsThatAreWrong) {
  const ModelGeometry g = uniform(1, 1, 64, Dtype::fp16);
  const PageLayout dense = make_layout(g, Format::dense), int4 = make_layout(g, Format::int4),
                   k8v4 = make_layout(g, Format::k8v4);
  Slots slot(1, dense.page_bytes);
  const std::vector<cuda::PageJob> one{{slot.at(0), slot.at(0)}};
  const auto code = [&](const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to,
                        const std::vector<cuda::PageJob>& jobs) {
    return transcoder_->launch(geometry, from, to, jobs).error().code;
  };
  EXPECT_EQ(code(g, int4, &k8v4, one), Errc::invalid_argument);
  EXPECT_EQ(code(g, dense, &int4, std::vector<cuda::PageJob>(kMaxJobs + 1, one[0])), Errc::invalid_argument);
  EXPECT_EQ(code(g, dense, &int4, {{nullptr, slot.at(0)}}), Errc::invalid_argument);
  EXPECT_EQ(code(g, dense, &int4, {{slot.at(0), nullptr}}), Errc::invalid_argument);
  EXPECT_EQ(code(g, dense, &int4, {{slot.at(0) + 8, slot.at(0)}}), Errc::invalid_argument);
  PageLayout unknown = int4;
  unknown.format = static_cast<Format>(9);
  EXPECT_EQ(code(g, dense, &unknown, one), Errc::wrong_layout);
  EXPECT_EQ(code(uniform(1, 1, 100, Dtype::fp16), dense, &int4, one), Errc::wrong_layout);
  EXPECT_EQ(code(ModelGeometry{}, dense, &int4, one), Errc::wrong_layout);
  for (std::uint32_t i = 0; i < 2 * kBatches; ++i)
    EXPECT_EQ(run(g, dense, nullptr, one).size(), 1u);  // no ticket was lost
}

}  // namespace
}  // namespace kvq
