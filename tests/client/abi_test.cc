// The border itself, without a daemon: sizes that may never change, names, error texts that name value and fix.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>

#include "client/aliases.h"
#include "kvq/kvq.hpp"
#include "kvq/result.h"

namespace {

TEST(Abi, StructSizesAreFrozen) {
  EXPECT_EQ(sizeof(kvq_connect_options), 32u);
  EXPECT_EQ(sizeof(kvq_layer), 8u);
  EXPECT_EQ(sizeof(kvq_model_desc), 80u);
  EXPECT_EQ(sizeof(kvq_model_info), 80u);
  EXPECT_EQ(sizeof(kvq_extra_key), 32u);
  EXPECT_EQ(sizeof(kvq_lookup_result), 48u);
  EXPECT_EQ(sizeof(kvq_open_options), 32u);
  EXPECT_EQ(sizeof(kvq_sequence_info), 72u);
  EXPECT_EQ(sizeof(kvq_pressure), 40u);
  EXPECT_EQ(sizeof(kvq_append_args), 88u);
  EXPECT_EQ(sizeof(kvq_attend_args), 192u);
  EXPECT_EQ(sizeof(kvq_fault), 24u);
  EXPECT_EQ(sizeof(kvq_alias), 8u);
}

TEST(Abi, EveryStatusHasAName) {
  for (int code = KVQ_OK; code <= KVQ_ERR_CONTEXT_LOST; ++code) {
    EXPECT_STRNE(kvq_status_name(static_cast<kvq_status>(code)), "unknown") << code;
  }
  EXPECT_STREQ(kvq_status_name(static_cast<kvq_status>(99)), "unknown");
  EXPECT_STREQ(kvq_status_name(KVQ_ERR_NO_MEMORY), "no_memory");
  EXPECT_EQ(kvq_abi_version(), static_cast<uint32_t>(KVQ_ABI_VERSION));
  EXPECT_STRNE(kvq_version(), "");
  EXPECT_STRNE(kvq_kernel_target(), "");
}

kvq_status connect_to(const std::string& path, uint32_t deadline_ms = 0) {
  const kvq_connect_options options{sizeof(options), path.c_str(), nullptr, deadline_ms};
  kvq_client* client = nullptr;
  return kvq_connect(&options, &client);
}

TEST(Abi, MissingDaemonIsNamedWithItsSocketAndTheFix) {
  EXPECT_EQ(connect_to("/nonexistent/kvqd.sock"), KVQ_ERR_NO_DAEMON);
  EXPECT_NE(std::strstr(kvq_last_error(), "/nonexistent/kvqd.sock"), nullptr) << kvq_last_error();
  EXPECT_NE(std::strstr(kvq_last_error(), "start kvqd"), nullptr) << kvq_last_error();
}

TEST(Abi, SocketPathThatIsTooLongIsRefused) {
  EXPECT_EQ(connect_to("/" + std::string(200, 'x')), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "201 bytes"), nullptr) << kvq_last_error();
}

TEST(Abi, SocketComesFromTheEnvironmentWhenNoneIsGiven) {
  ::setenv("KVQ_SOCKET", "/nonexistent/from-environment", 1);
  kvq_client* client = nullptr;
  EXPECT_EQ(kvq_connect(nullptr, &client), KVQ_ERR_NO_DAEMON);
  EXPECT_NE(std::strstr(kvq_last_error(), "from-environment"), nullptr) << kvq_last_error();
  ::unsetenv("KVQ_SOCKET");
}

TEST(Abi, NullHandlesAndShortStructsAreRefused) {
  EXPECT_EQ(kvq_connect(nullptr, nullptr), KVQ_ERR_INVALID_ARGUMENT);
  kvq_connect_options small{};
  small.size = 4;
  kvq_client* client = nullptr;
  EXPECT_EQ(kvq_connect(&small, &client), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "size is 4, expected 32"), nullptr) << kvq_last_error();
  EXPECT_EQ(kvq_step_begin(nullptr, nullptr), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "kvq_step_begin"), nullptr);
  EXPECT_EQ(kvq_disconnect(nullptr), KVQ_OK);
  EXPECT_EQ(kvq_model_close(nullptr), KVQ_OK);
  EXPECT_EQ(kvq_sequence_release(nullptr), KVQ_OK);
}

TEST(Abi, LastErrorBelongsToItsThread) {
  ASSERT_EQ(connect_to("/nonexistent/one"), KVQ_ERR_NO_DAEMON);
  std::thread([] { EXPECT_STREQ(kvq_last_error(), ""); }).join();
  EXPECT_NE(std::strstr(kvq_last_error(), "/nonexistent/one"), nullptr);
}

TEST(Abi, WrapperThrowsWithStatusAndText) {
  try {
    kvq::Client client("/nonexistent/kvqd.sock");
    FAIL() << "connected to nothing";
  } catch (const kvq::Failure& failure) {
    EXPECT_EQ(failure.status(), KVQ_ERR_NO_DAEMON);
    EXPECT_NE(std::strstr(failure.what(), "no_daemon: "), nullptr) << failure.what();
  }
}

TEST(Abi, MergeOfStatesEqualsTheUnion) {
  float out_a[] = {1, 2}, lse_a[] = {0}, out_b[] = {3, 6}, lse_b[] = {0};
  ASSERT_EQ(kvq_merge_states(out_a, lse_a, out_b, lse_b, 1, 2), KVQ_OK);
  EXPECT_FLOAT_EQ(out_a[0], 2);
  EXPECT_FLOAT_EQ(out_a[1], 4);
  EXPECT_NEAR(lse_a[0], 0.693147f, 1e-5);
}

TEST(Aliases, TranslateToPagesAndUnknownOnesToTheNullPage) {
  kvq::client::Aliases aliases;
  const kvq_alias set[] = {{5, 9}, {0, 3}};
  ASSERT_EQ(aliases.set(set, 2, 16), KVQ_OK);
  const std::int64_t slots[] = {5 * 64 + 7, KVQ_SKIP_SLOT, 1 * 64, 900 * 64 + 1};
  std::int64_t out[4];
  aliases.translate_slots(slots, 4, out);
  EXPECT_EQ(out[0], 9 * 64 + 7);
  EXPECT_EQ(out[1], KVQ_SKIP_SLOT);
  EXPECT_EQ(out[2], 0);
  EXPECT_EQ(out[3], 1);
}

TEST(Aliases, RefuseASetAsAWhole) {
  kvq::client::Aliases aliases;
  const kvq_alias bad_page[] = {{1, 2}, {2, 16}}, bad_alias[] = {{1 << 24, 1}};
  EXPECT_EQ(aliases.set(bad_page, 2, 16), KVQ_ERR_STALE_ID);
  EXPECT_EQ(aliases.set(bad_alias, 1, 16), KVQ_ERR_INVALID_ARGUMENT);
  const std::int32_t row[] = {1};
  std::int32_t out[] = {-1};
  aliases.translate_row(row, 1, out);
  EXPECT_EQ(out[0], 0);
}

}  // namespace
