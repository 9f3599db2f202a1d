// Where the pages are, as a client is told: a device that kvqd does not serve, and a GPU that this process cannot use.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "tests/multiprocess/reconnect.h"
#include "tests/support/daemon_process.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

constexpr const char* kUuid = "GPU-00000000-1111-2222-3333-444444444444";

struct Description {
  explicit Description(kvq_role role = KVQ_ROLE_BOTH, const char* device = nullptr) {
    desc.size = sizeof(desc);
    desc.layers = &layer;
    desc.layer_count = 1;
    desc.page_tokens = KVQ_PAGE_TOKENS;
    desc.role = role;
    desc.device = device;
  }
  const kvq_model_desc* get() const { return &desc; }
  const kvq_layer layer{kKvHeads, kHeadDim, KVQ_FP16, 0, kQueryHeads};
  kvq_model_desc desc{};
};

TEST(Device, OneThatKvqdDoesNotServeIsRefusedAndItsOwnIsNot) {
  DaemonProcess daemon(calm_settings());
  Client client(daemon.socket());
  kvq_model* model = nullptr;
  EXPECT_EQ(kvq_register_model(client.get(), Description(KVQ_ROLE_BOTH, kUuid).get(), &model),
            KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), kUuid), nullptr) << kvq_last_error();
  EXPECT_NE(std::strstr(kvq_last_error(), "\"host\""), nullptr) << kvq_last_error();
  ASSERT_EQ(kvq_register_model(client.get(), Description(KVQ_ROLE_BOTH, "host").get(), &model), KVQ_OK);
  EXPECT_EQ(kvq_model_close(model), KVQ_OK);
}

TEST(Device, HostTakesNoStreamNeedsNoWorkspaceAndHasNoFaults) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  EXPECT_STREQ(tiny.model().info().device, "host");
  EXPECT_STREQ(tiny.model().info().device_uuid, "");
  std::size_t bytes = 1;
  check(kvq_attend_workspace_bytes(tiny.get(), &bytes));
  EXPECT_EQ(bytes, 0u);
  kvq_fault fault{};
  fault.size = sizeof(fault);
  fault.status = KVQ_ERR_LOST_PAGE;
  check(kvq_get_fault(tiny.get(), &fault));
  EXPECT_EQ(fault.status, KVQ_OK);
  std::uint64_t step = 0;
  int stream = 0;
  check(kvq_step_begin(tiny.get(), &step));
  EXPECT_EQ(kvq_step_end(tiny.get(), step, &stream), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(kvq_step_end(tiny.get(), step, nullptr), KVQ_OK);
  float out[] = {1, 2, 3, 6}, lse[] = {0, 0};
  EXPECT_EQ(kvq_merge_states_on(tiny.get(), out, lse, out + 2, lse + 1, 1, 2, &stream), KVQ_ERR_INVALID_ARGUMENT);
  check(kvq_merge_states_on(tiny.get(), out, lse, out + 2, lse + 1, 1, 2, nullptr));
  EXPECT_FLOAT_EQ(out[1], 4);
}

TEST(Device, StructsOfTheFirstVersionAreStillTaken) {
  DaemonProcess daemon(calm_settings());
  Client client(daemon.socket());
  Description old(KVQ_ROLE_BOTH, kUuid);  // behind the size that it gives: not read
  old.desc.size = offsetof(kvq_model_desc, device);
  kvq_model* model = nullptr;
  ASSERT_EQ(kvq_register_model(client.get(), &old.desc, &model), KVQ_OK) << kvq_last_error();
  kvq_model_info info{};
  info.size = offsetof(kvq_model_info, device_uuid);
  info.device_uuid = kUuid;
  check(kvq_model_get_info(model, &info));
  EXPECT_STREQ(info.device, "host");
  EXPECT_EQ(info.device_uuid, kUuid);  // not written
  EXPECT_EQ(kvq_model_close(model), KVQ_OK);
}

// Without a driver or without CUDA in this build the status is SYSTEM; where there is a GPU it is another one.
TEST(Device, GpuThatThisProcessCannotUseIsNamedWithTheFixAndLeavesNoSession) {
  FakeDaemon daemon;
  FakeDaemon::Script script;
  script.device = "cuda";
  script.uuid = kUuid;
  daemon.set(script);
  Client client(daemon.socket());
  kvq_model* model = nullptr;
  const kvq_status refused = kvq_register_model(client.get(), Description().get(), &model);
  EXPECT_TRUE(refused == KVQ_ERR_SYSTEM || refused == KVQ_ERR_INVALID_ARGUMENT) << refused;
  EXPECT_EQ(model, nullptr);
  const std::string text = kvq_last_error();
  EXPECT_NE(text.find(kUuid), std::string::npos) << text;
  EXPECT_TRUE(text.find("install") != std::string::npos || text.find("visible") != std::string::npos) << text;
  for (int i = 0; daemon.seen().sessions != 0; ++i) {
    ASSERT_LT(i, 10'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // its end travels on its own
  }
}

TEST(Device, ControlSessionOfAGpuNeedsNone) {
  FakeDaemon daemon;
  FakeDaemon::Script script;
  script.device = "cuda";
  script.uuid = kUuid;
  daemon.set(script);
  Client client(daemon.socket());
  Model model(client, Description(KVQ_ROLE_CONTROL).desc);
  EXPECT_STREQ(model.info().device, "cuda");
  EXPECT_STREQ(model.info().device_uuid, kUuid);
  Sequence sequence = model.open({});
  sequence.reserve(100, 10'000);
  sequence.commit(token_stream(1, 100), 1, 77);
  EXPECT_EQ(sequence.info().pages, 2u);
}

TEST(Device, OneThatThisLibraryDoesNotKnowIsAnotherRelease) {
  FakeDaemon daemon;
  FakeDaemon::Script script;
  script.device = "abacus";
  daemon.set(script);
  Client client(daemon.socket());
  kvq_model* model = nullptr;
  EXPECT_EQ(kvq_register_model(client.get(), Description().get(), &model), KVQ_ERR_VERSION_MISMATCH);
  EXPECT_NE(std::strstr(kvq_last_error(), "abacus"), nullptr) << kvq_last_error();
}

}  // namespace
}  // namespace kvq::test
