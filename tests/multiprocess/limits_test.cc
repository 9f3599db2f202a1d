// What a client may not have, and when it is told so.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using Clock = std::chrono::steady_clock;

long ms_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
}

// 15 usable slabs of 8 dense pages, nothing that could be quantized away.
constexpr std::uint64_t kArenaPages = 15 * 8;

TEST(Limits, NoMemoryComesAtTheDeadlineAndNotBefore) {
  DaemonProcess daemon(calm_settings());
  ModelOptions options;
  options.floor_dense = true;
  TinyModel tiny(daemon.socket(), options);
  Sequence all = tiny.model().open({});
  std::uint64_t pages = 0;
  while (kvq_reserve(all.get(), (pages + 1) * KVQ_PAGE_TOKENS, 3000) == KVQ_OK) ++pages;
  EXPECT_GE(pages, kArenaPages - 16);
  Sequence more = tiny.model().open({});
  for (const std::uint32_t deadline_ms : {0u, 50u, 400u}) {
    const auto start = Clock::now();
    ASSERT_EQ(kvq_reserve(more.get(), 64 * KVQ_PAGE_TOKENS, deadline_ms), KVQ_ERR_NO_MEMORY) << kvq_last_error();
    const long waited = ms_since(start);
    EXPECT_GE(waited, static_cast<long>(deadline_ms));
    EXPECT_LE(waited, static_cast<long>(deadline_ms) + 400);
  }
  EXPECT_EQ(more.info().pages, 0u);  // all or nothing
}

TEST(Limits, WaitingReserveIsServedAsSoonAsPagesComeBack) {
  DaemonProcess daemon(calm_settings());
  ModelOptions options;
  options.floor_dense = true;
  TinyModel tiny(daemon.socket(), options);
  Sequence all = tiny.model().open({});
  std::uint64_t pages = 0;
  while (kvq_reserve(all.get(), (pages + 1) * KVQ_PAGE_TOKENS, 1000) == KVQ_OK) ++pages;
  Sequence more = tiny.model().open({});
  kvq_status status = KVQ_ERR_SYSTEM;
  std::thread waiter([&] { status = kvq_reserve(more.get(), 8 * KVQ_PAGE_TOKENS, 30'000); });
  all.truncate(0, 0);
  all = Sequence();
  waiter.join();
  EXPECT_EQ(status, KVQ_OK) << kvq_last_error();
  EXPECT_EQ(more.info().pages, 8u);
}

TEST(Limits, MoreThanTheQuotaIsOverQuotaAtOnce) {
  DaemonProcess daemon(calm_settings() + "unlisted_quota_bytes = \"512KiB\"\n");
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  const auto start = Clock::now();
  EXPECT_EQ(kvq_reserve(sequence.get(), 17 * KVQ_PAGE_TOKENS, 20'000), KVQ_ERR_OVER_QUOTA) << kvq_last_error();
  EXPECT_LE(ms_since(start), 5000);
  EXPECT_EQ(sequence.info().pages, 0u);
}

TEST(Limits, BatchReservesAllOrNothing) {
  DaemonProcess daemon(calm_settings() + "unlisted_quota_bytes = \"512KiB\"\n");
  TinyModel tiny(daemon.socket(), {});
  Sequence one = tiny.model().open({}), two = tiny.model().open({});
  kvq_sequence* const both[] = {one.get(), two.get()};
  const std::uint64_t too_many[] = {8 * 64, 9 * 64}, fits[] = {2 * 64, 64 + 1};
  EXPECT_EQ(kvq_reserve_batch(both, too_many, 2, 100), KVQ_ERR_OVER_QUOTA);
  EXPECT_EQ(one.info().pages + two.info().pages, 0u);
  EXPECT_EQ(kvq_reserve_batch(both, fits, 2, 20'000), KVQ_OK) << kvq_last_error();
  EXPECT_EQ(one.info().reserved_tokens, 2u * 64);
  EXPECT_EQ(two.info().reserved_tokens, 2u * 64);
}

TEST(Limits, WrongCallsAreRefusedWithTheirValues) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  sequence.reserve(10, 10'000);
  const auto tokens = token_stream(1, 65);
  EXPECT_EQ(kvq_commit(sequence.get(), tokens.data(), 65, 0, 0), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "65 tokens"), nullptr) << kvq_last_error();
  EXPECT_EQ(kvq_commit(sequence.get(), tokens.data(), 1, 7, 0), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "step 7"), nullptr) << kvq_last_error();
  EXPECT_EQ(kvq_truncate(sequence.get(), 1, 0), KVQ_ERR_INVALID_ARGUMENT);
  kvq_append_args append{};
  append.size = sizeof(append);
  EXPECT_EQ(kvq_append(tiny.get(), &append), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "kvq_step_begin"), nullptr) << kvq_last_error();
  {
    Step step(tiny.model());
    kvq_attend_args attend{};
    attend.size = sizeof(attend);
    attend.layer = kLayers;
    EXPECT_EQ(kvq_attend(tiny.get(), &attend), KVQ_ERR_INVALID_ARGUMENT);
    attend.layer = 0;
    attend.query_heads = 3;
    EXPECT_EQ(kvq_attend(tiny.get(), &attend), KVQ_ERR_WRONG_LAYOUT);
    attend.query_heads = kQueryHeads;
    attend.non_causal = 1;
    EXPECT_EQ(kvq_attend(tiny.get(), &attend), KVQ_ERR_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(kvq_last_error(), "causal"), nullptr) << kvq_last_error();
    EXPECT_EQ(kvq_model_close(tiny.get()), KVQ_ERR_INVALID_ARGUMENT);
  }
  std::int32_t table[1];
  EXPECT_EQ(kvq_block_table(sequence.get(), table, 0, nullptr), KVQ_ERR_INVALID_ARGUMENT);
  sequence.park();
  EXPECT_EQ(kvq_reserve(sequence.get(), 100, 0), KVQ_ERR_INVALID_ARGUMENT);
  sequence.resume(10'000);
  EXPECT_EQ(kvq_reserve(sequence.get(), 100, 10'000), KVQ_OK) << kvq_last_error();
}

TEST(Limits, ExportedBytesAreRefusedWhenDamagedOrTooLate) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  ModelOptions other_model;
  other_model.fingerprint = 2;
  TinyModel other(daemon.socket(), other_model);
  Sequence sequence = tiny.model().open({});
  sequence.reserve(64, 10'000);
  auto bytes = sequence.export_bytes();
  const auto import_into = [](TinyModel& into, const std::vector<std::uint8_t>& data) {
    kvq_sequence* handle = nullptr;
    const kvq_status status = kvq_sequence_import(into.get(), data.data(), data.size(), &handle);
    kvq_sequence_release(handle);
    return status;
  };
  EXPECT_EQ(import_into(tiny, bytes), KVQ_OK) << kvq_last_error();
  EXPECT_EQ(import_into(other, bytes), KVQ_ERR_WRONG_LAYOUT);
  auto damaged = bytes;
  damaged[0] ^= 1;
  EXPECT_EQ(import_into(tiny, damaged), KVQ_ERR_INVALID_ARGUMENT);
  damaged = bytes;
  damaged[8] ^= 1;
  EXPECT_EQ(import_into(tiny, damaged), KVQ_ERR_VERSION_MISMATCH);
  damaged = bytes;
  damaged.pop_back();
  EXPECT_EQ(import_into(tiny, damaged), KVQ_ERR_INVALID_ARGUMENT);
  damaged = bytes;
  damaged[100] ^= 1;  // the first page's generation
  EXPECT_EQ(import_into(tiny, damaged), KVQ_ERR_STALE_ID);
  DaemonProcess elsewhere(calm_settings());
  TinyModel stranger(elsewhere.socket(), {});
  EXPECT_EQ(import_into(stranger, bytes), KVQ_ERR_STALE_ID);
}

TEST(Limits, VersionMismatchIsSaidByTheDaemon) {
  DaemonProcess daemon(calm_settings());
  RawSession raw(daemon.socket());
  std::string message;
  EXPECT_EQ(raw.register_model(kContractVersion + 1, &message), KVQ_ERR_VERSION_MISMATCH);
  EXPECT_NE(message, "");
  EXPECT_EQ(raw.register_model(kContractVersion, &message), KVQ_OK) << message;
}

}  // namespace
}  // namespace kvq::test
