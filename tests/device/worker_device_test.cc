// A worker that dies, hangs, fails or refuses, at every kind of moment: no job is answered twice or not at all, no slab
// is lost, mirrors come to what their directories say, nothing is called published before it is visible, and kvqd's
// side never waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "daemon/device/worker_process.h"
#include "daemon/device/worker_watch.h"
#include "tests/device/worker_fixture.h"
#include "tests/support/seed.h"

namespace kvq::testing {
namespace {

using ::testing::HasSubstr;

// --- one fault each, in the middle of everything ---

class WorkerFault : public WorkerTest, public ::testing::WithParamInterface<const char*> {
 protected:
  // Two slabs that stay, one that comes and goes, jobs, publications, for as long as it takes until a worker was lost.
  void work_until_restarted(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    bool passing = false;
    for (const std::uint64_t end = clock_ms() + 20'000; clock_ms() < end && device->health().restarts == 0;) {
      publish(static_cast<std::uint32_t>(random() % kEntries));
      if (device->in_flight() < 100) submit(random() % 4 * kDensePage, kSlab + random() % 14 * kColdPage);
      if (random() % 4 == 0) {
        if (passing) {  // no job names it
          timed([&] { device->destroy_slab(SlabId{2}); });
          passing = false;
        } else if (!passing) {
          passing = static_cast<bool>(timed([&] { return device->create_slab(SlabId{2}); }));
        }
      }
      turn();
    }
    if (passing) device->destroy_slab(SlabId{2});
  }
};

TEST_P(WorkerFault, LosesNothing) {
  const std::uint64_t seed = test_seed(4);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  faults(GetParam());
  start();
  if (device == nullptr) return;
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  ASSERT_TRUE(device->create_slab(SlabId{1}));
  fill(SlabId{0}, 0x3555);
  const std::uint64_t serials[] = {device->slab_serial(SlabId{0}), device->slab_serial(SlabId{1})};
  add_mirror();
  open_mirror();
  work_until_restarted(seed);
  EXPECT_EQ(device->health().restarts, 1u);
  ASSERT_TRUE(settled()) << device->health().text;
  expect_each_job_answered_once();
  expect_mirror_equals_directory();
  EXPECT_EQ(first_value(SlabId{0}), 0x3555);
  EXPECT_EQ(device->slab_serial(SlabId{0}), serials[0]);
  EXPECT_EQ(device->slab_serial(SlabId{1}), serials[1]);
  for (std::uint32_t i = 2; i < kSlabs; ++i) {
    ASSERT_TRUE(until([&] { return static_cast<bool>(device->create_slab(SlabId{i})); })) << "slab " << i << " is lost";
  }
  submit(0, kSlab);
  ASSERT_TRUE(settled());
  EXPECT_EQ(last_error[last_job].code, Errc::ok)
      << "the next worker reads and writes what the last one did: " << last_error[last_job].context << "; "
      << ::testing::PrintToString(lines);
  EXPECT_LT(longest_us, kLongestCallUs);
}

INSTANTIATE_TEST_SUITE_P(Moments, WorkerFault,
                         ::testing::Values("die_at_job=1", "die_at_job=40,slow_us=300", "hang_at_job=1",
                                           "hang_at_job=25,slow_us=200", "lose_at_job=1", "lose_at_job=30,slow_us=100",
                                           "die_at_entry=3001,slow_writes_us=500",
                                           "die_at_entry=3100,slow_writes_us=2000", "hang_at_entry=3050",
                                           "die_at_call=10", "die_at_call=13", "die_at_call=16", "hang_at_call=12",
                                           "die_at_job=2,fail_every=2"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
                           return name;
                         });

// --- signals from outside, again and again ---

TEST_F(WorkerTest, KilledAndStoppedAtRandomAgainAndAgain) {
  const std::uint64_t seed = test_seed(9);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  faults("slow_us=100,slow_writes_us=300");
  start();
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  ASSERT_TRUE(device->create_slab(SlabId{1}));
  fill(SlabId{0}, 0x3001);
  add_mirror();
  open_mirror();
  for (std::uint64_t deaths = 0; deaths < 6; ++deaths) {
    for (std::uint64_t turns = random() % 300; turns > 0; --turns) {
      publish(static_cast<std::uint32_t>(random() % kEntries));
      if (random() % 3 == 0) submit(random() % 4 * kDensePage, kSlab + random() % 14 * kColdPage);
      turn();
    }
    signal(random() % 3 == 0 ? SIGSTOP : SIGKILL);
    ASSERT_TRUE(until([&] { return device->health().restarts > deaths; }));
  }
  ASSERT_TRUE(settled()) << device->health().text;
  expect_each_job_answered_once();
  expect_mirror_equals_directory();
  EXPECT_LT(longest_us, kLongestCallUs);
}

TEST_F(WorkerTest, AStoppedWorkersJobsAreAnsweredOnlyWhenItIsGone) {
  faults("slow_us=1000000");
  start();
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  submit(0, 32768);
  turn();
  signal(SIGSTOP);
  bool gone = false;
  ASSERT_TRUE(until([&] {
    pollfd wanted{worker.get(), POLLIN, 0};
    gone = gone || ::poll(&wanted, 1, 0) == 1;
    EXPECT_TRUE(gone || device->in_flight() == 1) << "it may still write to the destination";
    return device->in_flight() == 0;
  }));
  EXPECT_EQ(last_error[1].code, Errc::context_lost);
  EXPECT_THAT(lines.back(), HasSubstr("it stood still for 200 ms"));
  EXPECT_TRUE(device->health().degraded);
  EXPECT_THAT(device->health().text, HasSubstr("it stood still for 200 ms"));
}

TEST_F(WorkerTest, PublicationsStandStillWhileNoWorkerServes) {
  start();
  add_mirror();
  open_mirror();
  ASSERT_TRUE(settled());
  signal(SIGSTOP);
  publish(5);
  const std::uint64_t before = device->published();
  for (int i = 0; i < 50; ++i) {
    publish(static_cast<std::uint32_t>(i));
    turn();
    EXPECT_EQ(device->published(), before);
  }
  ASSERT_TRUE(settled());
  expect_mirror_equals_directory();
}

TEST_F(WorkerTest, WakesWhoeverWaitsForItsEndAndItsRestart) {
  start();
  turn();
  signal(SIGKILL);
  const std::uint64_t end = clock_ms() + 20'000;
  while (device->health().restarts == 0 || device->health().degraded) {  // advanced only when the descriptor says so
    ASSERT_LT(clock_ms(), end) << device->health().text;
    pollfd wanted{device->wake_descriptor(), POLLIN, 0};
    ASSERT_EQ(::poll(&wanted, 1, 10'000), 1);
    turn();
  }
}

// --- refusals ---

TEST_F(WorkerTest, ASlabThatTheNextWorkerCannotImportIsNamed) {
  start();
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  ASSERT_TRUE(device->create_slab(SlabId{1}));
  fill(SlabId{1}, 0x3c01);
  turn();
  faults("refuse_slab=1");
  signal(SIGKILL);
  ASSERT_TRUE(until([&] { return device->health().text.find("slab 1") != std::string::npos; }));
  EXPECT_TRUE(device->health().degraded);
  EXPECT_THAT(device->health().text, HasSubstr("injected: this slab cannot be imported"));
  EXPECT_EQ(first_value(SlabId{1}), 0x3c01) << "those who have mapped it read on";
  submit(kSlab, 0);
  ASSERT_TRUE(until([&] { return device->in_flight() == 0; }));
  EXPECT_EQ(last_error[last_job].code, Errc::system);
  submit(0, 32768);
  ASSERT_TRUE(until([&] { return device->in_flight() == 0; }));
  EXPECT_EQ(last_error[last_job].code, Errc::ok);
  device->destroy_slab(SlabId{1});
  ASSERT_TRUE(until([&] { return !device->health().degraded; }));
}

TEST_F(WorkerTest, AMirrorThatCannotBeAdoptedHoldsPublicationsBack) {
  start();
  add_mirror();
  open_mirror();
  ASSERT_TRUE(settled());
  faults("refuse_mirror=1");
  signal(SIGKILL);
  const std::uint64_t before = device->published();
  publish(1);
  ASSERT_TRUE(until([&] { return device->health().restarts >= 2; }));
  EXPECT_EQ(device->published(), before);
  EXPECT_THAT(device->health().text, HasSubstr("injected: this mirror cannot be imported"));
  faults("");
  ASSERT_TRUE(settled());
  expect_mirror_equals_directory();
}

TEST_F(WorkerTest, AMirrorWithoutRoomIsAskedForAgain) {
  faults("mirrors=0");
  start();
  add_mirror();
  ASSERT_TRUE(until([&] { return device->health().degraded && device->health().restarts == 0; }));
  EXPECT_THAT(device->health().text, HasSubstr("mirror of tenant 1: injected: no room for a mirror"));
  EXPECT_EQ(device->mirror_descriptor(TenantId{1}), -1);
  faults("");
  signal(SIGKILL);
  open_mirror();
  ASSERT_TRUE(settled());
  expect_mirror_equals_directory();
}

// --- memory that ends with its worker ---

class LegacyWorkerTest : public WorkerTest {
 protected:
  LegacyWorkerTest() { faults("legacy=1"); }
  WorkerOptions legacy_options() {
    WorkerOptions o = options();
    o.pages_lost = [this] { ++times_lost; };
    return o;
  }
  int times_lost = 0;
};

TEST_F(LegacyWorkerTest, ASlabComesBackToItsOwnPlaceZeroed) {
  start(legacy_options());
  EXPECT_FALSE(device->can_adopt());
  EXPECT_EQ(device->health().exporter, "legacy");
  const auto made = [&](std::uint32_t i) {
    return until([&] { return static_cast<bool>(device->create_slab(SlabId{i})); });
  };
  for (const std::uint32_t i : {4u, 1u, 5u, 0u, 3u, 2u}) ASSERT_TRUE(made(i)) << i;
  for (std::uint32_t i = 0; i < kSlabs; ++i) fill(SlabId{i}, static_cast<std::uint16_t>(0x3000 + i));
  const std::uint64_t serial = device->slab_serial(SlabId{2});
  device->destroy_slab(SlabId{2});
  EXPECT_EQ(device->create_slab(SlabId{2}).error().code, Errc::no_memory) << "its only spare is still being zeroed";
  device->destroy_slab(SlabId{5});
  ASSERT_TRUE(made(2));
  ASSERT_TRUE(made(5));
  EXPECT_NE(device->slab_serial(SlabId{2}), serial);
  for (std::uint32_t i = 0; i < kSlabs; ++i) {
    EXPECT_EQ(first_value(SlabId{i}), i == 2 || i == 5 ? 0 : 0x3000 + i);
  }
  submit(0, kSlab);
  ASSERT_TRUE(settled());
  EXPECT_EQ(last_error[1].code, Errc::ok);
}

TEST_F(LegacyWorkerTest, ItsEndIsTheEndOfThePages) {
  faults("legacy=1,slow_us=1000000");
  start(legacy_options());
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  add_mirror();
  open_mirror();
  submit(0, 32768);
  turn();
  signal(SIGKILL);
  ASSERT_TRUE(until([&] { return times_lost > 0; }));
  EXPECT_EQ(last_error[1].code, Errc::context_lost);
  EXPECT_THAT(lines.back(),
              HasSubstr("event=gpu_pages_lost uuid=GPU-00000000-0000-0000-0000-000000000000 why=\"the GPU "
                        "worker ended: it ended by itself with signal 9\" jobs_lost=1"));
  EXPECT_THAT(device->health().text, HasSubstr("the pages are lost with the GPU worker"));
  EXPECT_EQ(device->create_slab(SlabId{1}).error().code, Errc::no_memory);
  device->destroy_slab(SlabId{0});
  publish(3);
  EXPECT_FALSE(until([&] { return device->health().restarts > 0 || times_lost > 1; }, 500));
}

TEST_F(LegacyWorkerTest, OneThatStandsStillIsKilledAllTheSame) {
  start(legacy_options());
  turn();
  signal(SIGSTOP);
  ASSERT_TRUE(until([&] { return times_lost > 0; }));
  EXPECT_THAT(lines.back(), HasSubstr("it stood still for 200 ms"));
}

TEST_F(LegacyWorkerTest, FewerPlacesThanAskedForAreServed) {
  faults("legacy=1,slabs=4");
  MadeWorkerDevice made = make_worker_device(options());
  ASSERT_NE(made.device, nullptr) << made.why_not;
  EXPECT_EQ(made.device->slabs(), 3u);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(made.device->create_slab(SlabId{i}));
  faults("legacy=1,slabs=1");
  EXPECT_THAT(make_worker_device(options()).why_not, HasSubstr("0 of 6 slabs"));
}

// --- start-up ---

TEST_F(WorkerTest, FewerSlabsThanAskedForAreServedAndSaid) {
  faults("slabs=4");
  MadeWorkerDevice made = make_worker_device(options());
  ASSERT_NE(made.device, nullptr) << made.why_not;
  EXPECT_EQ(made.device->slabs(), 3u) << "one is left for what else the GPU must hold";
  EXPECT_THAT(made.warning, HasSubstr("3 of 6 slabs"));
  EXPECT_THAT(made.warning, HasSubstr("536870912 bytes"));
}

TEST_F(WorkerTest, NoUsableSlabIsARefusalWithBothNumbers) {
  faults("slabs=1");
  const MadeWorkerDevice made = make_worker_device(options());
  EXPECT_EQ(made.device, nullptr);
  EXPECT_THAT(made.why_not, HasSubstr("1 of 6 slabs"));
  EXPECT_THAT(made.why_not, HasSubstr("536870912 bytes (512 MiB) of 1073741824 bytes (1024 MiB) were free"));
  EXPECT_THAT(made.why_not, HasSubstr("free GPU memory"));
  EXPECT_FALSE(made.no_device);
}

TEST_F(WorkerTest, HoldsAllSlabsFromTheStartAndMirrorsAsTheyCome) {
  start();
  if (device == nullptr) return;
  EXPECT_EQ(device->health().held_bytes, kSlabs * kSlab);
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  EXPECT_EQ(device->health().held_bytes, kSlabs * kSlab) << "a spare that gets its place is held as before";
  add_mirror();
  open_mirror();
  EXPECT_EQ(device->health().held_bytes, kSlabs * kSlab + round_up(kEntries * sizeof(DirectoryEntry), 4096));
}

TEST_F(WorkerTest, ShareOfTheGpu) {
  faults("total_bytes=1000000");
  WorkerOptions o = options();
  o.arena_share = 0.8;
  start(o);
  EXPECT_EQ(device->slabs(), 12u);
}

TEST_F(WorkerTest, EachReasonNotToStartIsNamed) {
  const auto why_not = [&](WorkerOptions o) {
    const MadeWorkerDevice made = make_worker_device(std::move(o));
    EXPECT_EQ(made.device, nullptr);
    return made.why_not;
  };
  WorkerOptions o = options();
  o.command = {"/nowhere/kvqd-gpu"};
  EXPECT_EQ(why_not(o),
            "/nowhere/kvqd-gpu cannot be started: No such file or directory; install kvqd-gpu, or give "
            "its path with --gpu-worker");
  o = options();
  o.command = {"/bin/true"};
  EXPECT_THAT(why_not(o), HasSubstr("it ended with exit code 0 before it said what GPU there is"));
  o = options();
  o.uuid = "GPU-1234";
  EXPECT_EQ(why_not(o),
            "GPU GPU-1234 is not here, the worker found GPU-00000000-0000-0000-0000-000000000000; "
            "nvidia-smi -L lists them");
  o = options();
  o.slab_bytes = 1024;
  EXPECT_THAT(why_not(o), HasSubstr("this GPU maps multiples of 4096 bytes"));
  o = options();
  o.arena_bytes = kSlab;
  EXPECT_THAT(why_not(o), HasSubstr("the arena would be 1 slabs"));
  faults("no_gpu=no CUDA driver: install one");
  EXPECT_THAT(why_not(options()), HasSubstr("finds no GPU to work with: no CUDA driver: install one"));
  faults("hang_at_call=1");
  o = options();
  o.start_ms = 100;
  EXPECT_THAT(why_not(o), HasSubstr("did not make its slabs within 100 ms"));
}

// --- the next kvqd ---

class WorkerAdopts : public WorkerTest {
 protected:
  void leave_a_slab() {
    start();
    ASSERT_TRUE(device->create_slab(SlabId{0}));
    fill(SlabId{0}, 0x3aaa);
    kept = Descriptor(::dup(device->descriptor(SlabId{0}, true)));
    serial = device->slab_serial(SlabId{0});
    turn();
    signal(SIGSTOP);
    const Descriptor earlier(::dup(worker.get()));
    pollfd alive{earlier.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&alive, 1, 0), 0);
    ASSERT_TRUE(end_process(earlier.get(), 10'000));
    ASSERT_EQ(::poll(&alive, 1, 0), 1);
  }
  void start_next() {
    WorkerOptions o = options();
    o.kept_arena_bytes = kSlabs * kSlab;
    start(o);
  }

  Descriptor kept;
  std::uint64_t serial = 0;
};

// Whoever adopts must be sure that nobody writes any more, whatever state the earlier worker is in.
TEST_F(WorkerAdopts, AnEarlierWorkerIsEndedBeforeTheNextDeviceAdopts) {
  leave_a_slab();
  start_next();
  ASSERT_TRUE(device->adopt_slab(SlabId{0}, kept, serial));
  EXPECT_EQ(first_value(SlabId{0}), 0x3aaa);
  submit(0, 32768);
  ASSERT_TRUE(settled());
  EXPECT_EQ(last_error[1].code, Errc::ok);
}

TEST_F(WorkerAdopts, ASlabThatTheWorkerHasNoRoomForIsAdoptedAndReachedByALaterOne) {
  leave_a_slab();
  faults("no_room_for_slab=0");
  start_next();
  ASSERT_TRUE(device->adopt_slab(SlabId{0}, kept, serial));
  EXPECT_THAT(device->health().text, HasSubstr("slab 0: injected: no room to map this slab"));
  EXPECT_EQ(first_value(SlabId{0}), 0x3aaa);
  EXPECT_EQ(device->slab_serial(SlabId{0}), serial);
  submit(0, 32768);
  ASSERT_TRUE(until([&] { return device->in_flight() == 0; }));
  EXPECT_EQ(last_error[last_job].code, Errc::system);
  faults("");
  signal(SIGKILL);
  ASSERT_TRUE(until([&] { return device->health().restarts == 1 && !device->health().degraded; }));
  submit(0, 32768);
  ASSERT_TRUE(settled());
  EXPECT_EQ(last_error[last_job].code, Errc::ok);
}

TEST_F(WorkerAdopts, ASlabThatCannotBeImportedAtAllIsNotAdopted) {
  leave_a_slab();
  faults("refuse_slab=0");
  start_next();
  EXPECT_EQ(device->adopt_slab(SlabId{0}, kept, serial).error().code, Errc::system);
}

TEST_F(WorkerTest, WhoWaitsForMemoryMakesWhatWasSubmittedBeforeRunAtOnce) {
  faults("paced=1,die_at_job=2");
  start();
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  ASSERT_TRUE(device->create_slab(SlabId{1}));
  submit(0, kSlab);
  device->set_urgent(false);
  EXPECT_FALSE(until([&] { return device->in_flight() == 0; }, 100));
  device->set_urgent(true);
  ASSERT_TRUE(until([&] { return device->in_flight() == 0; }, 5000));
  EXPECT_EQ(last_error[1].code, Errc::ok);
  submit(0, kSlab);  // the worker dies of it
  ASSERT_TRUE(until([&] { return device->health().restarts == 1 && !device->health().degraded; }));
  submit(0, kSlab);
  EXPECT_FALSE(until([&] { return device->in_flight() == 0; }, 100)) << "the next worker has been told nothing yet";
  device->set_urgent(true);  // as the store says at each tick
  ASSERT_TRUE(until([&] { return device->in_flight() == 0; }, 5000));
  EXPECT_EQ(last_error[3].code, Errc::ok);
  expect_each_job_answered_once();
}

TEST_F(WorkerTest, ThePidfdOfNothingIsNoReasonToWait) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor reader(ends[0]), writer(ends[1]);
  EXPECT_TRUE(end_process(reader.get(), 10'000));
}

// --- when a worker counts as stuck ---

TEST(WorkerWatch, TimeInWhichNobodyLookedIsNotHeldAgainstIt) {
  WorkerWatch watch(1000, 200, 10'000);
  watch.started(0);
  EXPECT_FALSE(watch.stuck(10, 1));
  EXPECT_FALSE(watch.stuck(1'000'000, 1)) << "kvqd was stopped, perhaps with its worker";
  EXPECT_FALSE(watch.stuck(1'000'200, 2));
  std::uint64_t now = 1'000'200;
  while (!watch.stuck(now, 2)) now += 100;
  EXPECT_EQ(now, 1'001'200u);
}

TEST(WorkerWatch, PausesDoubleUntilAWorkerHasWorkedForTheLongest) {
  WorkerWatch watch(1000, 200, 10'000);
  std::uint64_t now = 0;
  for (const std::uint64_t pause : {200u, 400u, 800u, 1600u, 3200u, 6400u, 10'000u, 10'000u}) {
    watch.started(now);
    EXPECT_EQ(watch.next_start_ms(now), now + pause);
    now += 100;
  }
  watch.started(now);
  now += 10'000;
  EXPECT_EQ(watch.next_start_ms(now), now + 200);
}

}  // namespace
}  // namespace kvq::testing
