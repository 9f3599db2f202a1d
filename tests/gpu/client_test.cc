// libkvq's CUDA side over a daemon of the test's own: registration, steps that the GPU ends, graphs, faults, and a
// context that is lost.
//
// Invariant: the slab and the mirror are this process's; a client that breaks its context is a role.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>

#include "client/abi.h"
#include "kernels/cuda/vmm.h"
#include "tests/gpu/client_kernels.h"
#include "tests/gpu/gpu_model.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/role_process.h"

namespace kvq::test {
namespace {

constexpr std::uint64_t kBytes = 16 << 20;  // of the slab, and of the mirror

template <typename T>
T must_have(Result<T> result) {
  if (!result)
    throw std::runtime_error(std::string(result.error().context) + ": " + cuda::driver_text(result.error().native));
  return std::move(*result);
}

// Memory of the GPU as kvqd would hand it out.
struct Memory {
  explicit Memory(CUdevice device)
      : physical(must_have(cuda::Physical::create(device, kBytes))),
        range(must_have(cuda::AddressRange::reserve(device, kBytes))),
        mapping(must_have(range.map(0, kBytes, physical, cuda::Access::read_write))),
        fd(must_have(physical.export_fd())) {
    MUST(cudaMemset(address(), 0, kBytes));
    MUST(cudaDeviceSynchronize());
  }
  ~Memory() { ::close(fd); }
  std::byte* address() const { return reinterpret_cast<std::byte*>(mapping.base()); }
  cuda::Physical physical;
  cuda::AddressRange range;
  cuda::Mapping mapping;
  const int fd;
};

// A daemon whose pages are in this process's part of the GPU.
class GpuDaemon {
 public:
  const std::string& socket() const { return daemon_.socket(); }
  const std::string& uuid() const { return uuid_; }

 private:
  FakeGpu describe() {
    FakeGpu gpu;
    gpu.uuid = uuid_;
    gpu.slab_bytes = gpu.mirror_bytes = kBytes;
    gpu.slab_fd = slab_.fd;
    gpu.mirror_fd = mirror_.fd;
    gpu.publish = [this](std::uint32_t page, std::uint64_t entry) {
      MUST(cudaSetDevice(0));
      MUST(cudaMemcpy(mirror_.address() + 8 * page, &entry, sizeof entry, cudaMemcpyHostToDevice));
    };
    return gpu;
  }

  const bool context_ = cudaSetDevice(0) == cudaSuccess && cudaFree(nullptr) == cudaSuccess;
  const std::string uuid_ = must_have(cuda::visible_gpus()).front().uuid;
  Memory slab_{0}, mirror_{0};
  const FakeGpu gpu_ = describe();
  FakeDaemon daemon_{&gpu_};
};

// Serves until its input ends, for clients that are no tests of this program.
KVQ_ROLE(gpu_daemon) {
  const GpuDaemon daemon;
  say(daemon.socket());
  hear();
  return 0;
}

class ClientOnGpu : public ::testing::Test {
 protected:
  GpuDaemon daemon_;
};

TEST_F(ClientOnGpu, AppendAndAttendEqualTheOracleOnEveryLayer) {
  GpuModel gpu(daemon_.socket());
  EXPECT_STREQ(gpu.model().info().device, "cuda");
  EXPECT_EQ(gpu.model().info().device_uuid, daemon_.uuid());
  const auto tokens = token_stream(1, 200);
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, tokens);
  for (const std::int32_t length : {1, 63, 64, 65, 200}) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      EXPECT_EQ(gpu.attend_and_check(sequence.block_table(), length, layer, test_seed()).exact, 1u);
  }
  EXPECT_EQ(gpu.fault().status, KVQ_OK);
}

TEST_F(ClientOnGpu, StepsOfManyStreamsEndWhenTheGpuGetsThere) {
  GpuModel gpu(daemon_.socket());
  const Stream slow, fast;
  std::uint64_t first = 0, second = 0;
  check(kvq_step_begin(gpu.get(), &first));
  ASSERT_EQ(spin_on(slow, 300), 0);
  const auto began = std::chrono::steady_clock::now();
  check(kvq_step_end(gpu.get(), first, slow));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(100)) << "step_end waited";
  check(kvq_step_begin(gpu.get(), &second));
  check(kvq_step_end(gpu.get(), second, fast));
  const client::Steps& steps = gpu.get()->model->steps();
  fast.wait();
  EXPECT_TRUE(steps.is_over(second));
  EXPECT_FALSE(steps.is_over(first));
  EXPECT_EQ(kvq_step_end(gpu.get(), first, slow), KVQ_ERR_INVALID_ARGUMENT);
  slow.wait();
  EXPECT_TRUE(steps.is_over(first));
}

TEST_F(ClientOnGpu, ModelIsNotClosedUnderAStepThatRuns) {
  Client client(daemon_.socket());
  const kvq_layer layer{kKvHeads, kHeadDim, KVQ_FP16, 0, kQueryHeads};
  kvq_model_desc desc{};
  desc.size = sizeof(desc);
  desc.layers = &layer;
  desc.layer_count = 1;
  desc.page_tokens = KVQ_PAGE_TOKENS;
  kvq_model* model = nullptr;
  check(kvq_register_model(client.get(), &desc, &model));
  const Stream stream;
  std::uint64_t step = 0;
  check(kvq_step_begin(model, &step));
  ASSERT_EQ(spin_on(stream, 200), 0);
  check(kvq_step_end(model, step, stream));
  EXPECT_EQ(kvq_model_close(model), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "synchronize the stream"), nullptr) << kvq_last_error();
  stream.wait();
  EXPECT_EQ(kvq_model_close(model), KVQ_OK) << kvq_last_error();
}

// A graph of append and attend, captured once.
TEST_F(ClientOnGpu, CapturedGraphIsReplayedWithOtherLengthsTablesAndSlots) {
  GpuModel gpu(daemon_.socket());
  const Stream stream;
  Sequence one = gpu.model().open({}), other = gpu.model().open({});
  gpu.write(one, 0, token_stream(1, 150), stream);
  gpu.write(other, 0, token_stream(2, 90), stream);
  Attention attention(3, 1, test_seed());
  attention.set(one.block_table(), 150, stream);
  attention.args().stream = stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t launchable = nullptr;
  std::uint64_t captured_in = 0;
  check(kvq_step_begin(gpu.get(), &captured_in));
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  gpu.model().attend(attention.args());
  EXPECT_EQ(kvq_step_end(gpu.get(), captured_in, stream), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "captured"), nullptr) << kvq_last_error();
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&launchable, graph, 0));
  check(kvq_step_end(gpu.get(), captured_in, stream));
  const auto replay = [&](Sequence& sequence, std::int32_t length) {
    auto table = sequence.block_table();
    Step step(gpu.model());
    attention.set(table, length, stream);
    MUST(cudaGraphLaunch(launchable, stream));
    stream.wait();
    gpu.check(attention, table, length);
    step.end(stream);
  };
  replay(one, 150);
  replay(one, 7);
  replay(other, 90);
  gpu.write(other, 90, token_stream(3, 60), stream);
  replay(other, 150);
  MUST(cudaGraphExecDestroy(launchable));
  MUST(cudaGraphDestroy(graph));
}

TEST_F(ClientOnGpu, AliasesNamePagesAndChangeInTheOrderOfAStream) {
  GpuModel gpu(daemon_.socket());
  const Stream stream;
  Sequence one = gpu.model().open({}), other = gpu.model().open({});
  gpu.write(one, 0, token_stream(1, 64), stream);
  gpu.write(other, 0, token_stream(2, 64), stream);
  const std::int32_t first = one.block_table()[0], second = other.block_table()[0];
  const kvq_alias at_first[] = {{70'000, first}}, at_second[] = {{70'000, second}};
  check(kvq_set_aliases(gpu.get(), at_first, 1));
  Attention before(1, 0, test_seed()), after(1, 0, test_seed());
  for (Attention* attention : {&before, &after}) {
    attention->set({70'000}, 64, stream);
    attention->args().table_has_aliases = 1;
  }
  Step step(gpu.model());
  ASSERT_EQ(spin_on(stream, 100), 0);
  gpu.model().attend(before.args());
  check(kvq_set_aliases_on(gpu.get(), at_second, 1, stream));  // while the first call has not run yet
  gpu.model().attend(after.args());
  stream.wait();
  gpu.check(before, {first}, 64);
  gpu.check(after, {second}, 64);
  step.end(stream);
  EXPECT_EQ(gpu.fault().status, KVQ_OK);
}

TEST_F(ClientOnGpu, AppendGoesToAliasedSlots) {
  GpuModel gpu(daemon_.socket());
  const auto tokens = token_stream(4, 10);
  Sequence sequence = gpu.model().open({});
  sequence.reserve(64, 10'000);
  const std::int32_t page = sequence.block_table()[0];
  const kvq_alias alias[] = {{5, page}};
  check(kvq_set_aliases(gpu.get(), alias, 1));
  const std::vector<std::int64_t> slots = {5 * 64 + 3, KVQ_SKIP_SLOT, 9 * 64};  // the last is no alias: swallowed
  const OnGpu<std::int64_t> slots_on_gpu(slots);
  const OnGpu<std::uint16_t> k(std::vector<std::uint16_t>(3 * kHeadDim, 0x3c00));
  kvq_append_args args{};
  args.size = sizeof(args);
  args.tokens = 3;
  args.k = args.v = k.data();
  args.k_token_stride = args.v_token_stride = args.k_head_stride = args.v_head_stride = kHeadDim;
  args.slots = slots_on_gpu.data();
  args.slots_are_aliases = 1;
  Step step(gpu.model());
  gpu.model().append(args);
  const std::vector<std::byte> bytes = [&] {
    MUST(cudaDeviceSynchronize());
    return gpu.page_bytes(gpu.entry_words({page})[0]);
  }();
  step.end();
  const auto* halves = reinterpret_cast<const std::uint16_t*>(bytes.data());
  for (std::uint32_t c = 0; c < kHeadDim; ++c) {
    EXPECT_EQ(halves[dense_index(3, c, kHeadDim)], 0x3c00);
    EXPECT_EQ(halves[dense_index(0, c, kHeadDim)], 0);
  }
}

TEST_F(ClientOnGpu, WhatOnlyTheGpuSeesIsSaidByTheFaultWordOnce) {
  GpuModel gpu(daemon_.socket());
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, token_stream(1, 100));
  Attention attention(2, 1, test_seed());
  attention.set({sequence.block_table()[0], 999'999}, 100);
  {
    Step step(gpu.model());
    gpu.model().attend(attention.args());
    MUST(cudaDeviceSynchronize());
  }
  const kvq_fault fault = gpu.fault();
  EXPECT_EQ(fault.status, KVQ_ERR_STALE_ID);
  EXPECT_EQ(fault.layer, 1u);
  EXPECT_EQ(fault.index, 0u);
  EXPECT_EQ(fault.page, 999'999);
  EXPECT_TRUE(std::isnan(attention.out()[0]));
  EXPECT_EQ(gpu.fault().status, KVQ_OK);
  EXPECT_EQ(gpu.attend_and_check(sequence.block_table(), 100, 1, test_seed()).exact, 1u);
}

TEST_F(ClientOnGpu, ForkCopiesAnUnfinishedPageOnceItsStepIsOver) {
  GpuModel gpu(daemon_.socket());
  const Stream stream;
  const auto tokens = token_stream(1, 100);
  Sequence sequence = gpu.model().open({});
  sequence.reserve(100, 10'000);
  {
    Step step(gpu.model());
    gpu.append(sequence, 0, tokens, stream);
    sequence.commit(tokens, step.serial());
    kvq_sequence* early = nullptr;
    EXPECT_EQ(kvq_fork(sequence.get(), 1000, &early), KVQ_ERR_INVALID_ARGUMENT);  // its step is open
    EXPECT_NE(std::strstr(kvq_last_error(), "end it first"), nullptr) << kvq_last_error();
    ASSERT_EQ(spin_on(stream, 50), 0);
    step.end(stream);
  }
  Sequence child = sequence.fork(10'000);  // waits for the step
  EXPECT_NE(child.block_table()[1], sequence.block_table()[1]);
  EXPECT_EQ(child.block_table()[0], sequence.block_table()[0]);
  EXPECT_EQ(gpu.attend_and_check(child.block_table(), 100, 0, test_seed(), 1, stream).exact, 1u);
  EXPECT_EQ(gpu.attend_and_check(child.block_table(), 100, 1, test_seed(), 1, stream).exact, 1u);
}

TEST_F(ClientOnGpu, WorkspaceOfTheCallersServesAsWellAsTheModelsOwn) {
  GpuModel gpu(daemon_.socket());
  std::size_t bytes = 0;
  check(kvq_attend_workspace_bytes(gpu.get(), &bytes));
  ASSERT_GT(bytes, 0u);
  const OnGpu<std::byte> workspace(bytes);
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, token_stream(1, 130));
  Attention attention(3, 0, test_seed());
  attention.set(sequence.block_table(), 130);
  attention.args().workspace = workspace.data();
  attention.args().workspace_bytes = bytes;
  attention.args().max_query_tokens = 1;
  Step step(gpu.model());
  gpu.model().attend(attention.args());
  gpu.check(attention, sequence.block_table(), 130);
  attention.args().workspace_bytes = 16;
  EXPECT_EQ(kvq_attend(gpu.get(), &attention.args()), KVQ_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvq_last_error(), "kvq_attend, layer 0: workspace"), nullptr) << kvq_last_error();
}

TEST_F(ClientOnGpu, MergeOfStatesRunsOnTheStream) {
  GpuModel gpu(daemon_.socket());
  const Stream stream;
  const OnGpu<float> out_a(std::vector<float>{1, 2}), lse_a(std::vector<float>{0});
  const OnGpu<float> out_b(std::vector<float>{3, 6}), lse_b(std::vector<float>{0});
  check(kvq_merge_states_on(gpu.get(), out_a.data(), lse_a.data(), out_b.data(), lse_b.data(), 1, 2, stream));
  EXPECT_NEAR(out_a.get()[1], 4, 1e-5);
  EXPECT_NEAR(lse_a.get()[0], 0.693147f, 1e-5);
}

TEST_F(ClientOnGpu, TwoModelsOfAProcessShareOneMapping) {
  GpuModel one(daemon_.socket());
  ModelOptions options;
  options.fingerprint = 2;
  GpuModel other(daemon_.socket(), options);
  EXPECT_EQ(one.get()->model->memory().arena(), other.get()->model->memory().arena());
  EXPECT_EQ(one.get()->model->memory().kernel_entries(), other.get()->model->memory().kernel_entries());
}

// Arguments: socket. Resets its healthy context under the model.
KVQ_ROLE(gpu_resetter) {
  GpuModel gpu(arguments[0]);
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, token_stream(9, 100));
  const kvq_alias alias[] = {{3, sequence.block_table()[0]}};
  check(kvq_set_aliases(gpu.get(), alias, 1));
  gpu.attend_and_check(sequence.block_table(), 100, 1, test_seed());
  MUST(cudaDeviceReset());
  MUST(cudaFree(nullptr));  // which makes another
  std::uint64_t step = 0;
  std::size_t bytes = 0;
  for (int twice = 0; twice < 2; ++twice) expect_lost(kvq_step_begin(gpu.get(), &step), "begin");
  expect_lost(kvq_set_aliases(gpu.get(), alias, 1), "aliases");
  expect_lost(kvq_attend_workspace_bytes(gpu.get(), &bytes), "workspace");
  say("session kept, " + std::to_string(sequence.info().pages) + " pages");
  return 0;
}

TEST_F(ClientOnGpu, ResetOfTheContextIsNoticedAndClosingWorks) {
  RoleProcess role("gpu_resetter", {daemon_.socket()});
  EXPECT_EQ(role.hear(), "session kept, 2 pages");
  EXPECT_EQ(role.wait(), 0);
}

TEST(ClientOnAnotherGpu, IsRefusedByName) {
  FakeDaemon daemon;
  FakeDaemon::Script script;
  script.device = "cuda";
  script.uuid = "GPU-00000000-1111-2222-3333-444444444444";
  daemon.set(script);
  try {
    GpuModel gpu(daemon.socket());
    FAIL() << "registered";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status(), KVQ_ERR_INVALID_ARGUMENT);
    const std::string text = failure.what();
    EXPECT_NE(text.find(script.uuid), std::string::npos) << text;
    EXPECT_NE(text.find(must_have(cuda::visible_gpus()).front().uuid), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace kvq::test

int main(int argc, char** argv) { return kvq::test::main_with_roles(argc, argv); }
