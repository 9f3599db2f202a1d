// Invariant: a call first asks whether the context is known to be lost, then launches; whatever the driver answers is
// judged in one place (CudaSide::failed), so that a broken context is CONTEXT_LOST wherever it shows first.
#include "client/cuda_model.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "client/last_error.h"
#include "kernels/cuda/cuda_kernels.h"

namespace kvq::client {
namespace {

constexpr std::size_t kRegisteredBytes = 4096;  // the step slots, and the page of the fault word
static_assert(sizeof(StepSlot) * kStepSlots == kRegisteredBytes && offsetof(Segment, step) % kRegisteredBytes == 0);
constexpr std::size_t kAliasBytes = (std::size_t{kMaxAlias} + 1) * sizeof(std::int32_t);
constexpr std::size_t kWritesAtOnce = 256;  // what the driver takes in one batch

Error error_of(int native, const char* what) { return cuda::driver_error(native, what); }

std::string in_layer(const char* call, std::uint32_t layer) {
  return std::string(call) + ", layer " + std::to_string(layer);
}

}  // namespace

CudaModelSide::CudaModelSide(CudaSide& device, Segment& segment) : device_(device), segment_(segment) {}

CudaModelSide::~CudaModelSide() {
  const bool same = device_.check_same("closing") == KVQ_OK;
  const ContextScope scope(device_);
  const UncapturedScope uncaptured;
  if (same) {
    if (stream_ != nullptr) device_.driver().stream_synchronize(stream_);
    transcoder_.reset();
    if (void* table = alias_table_.load(); table != nullptr) cudaFree(table);
    if (void* workspace = workspace_.load(); workspace != nullptr) cudaFree(workspace);
    if (stream_ != nullptr) device_.driver().stream_destroy(stream_);
  }
  static_cast<void>(transcoder_.release());  // null, or of a context that is gone
  for (const Registered* memory : {&steps_, &fault_}) {
    if (memory->device != 0) device_.driver().mem_host_unregister(memory->at);  // which a lost context may refuse
  }
  if (fault_.at != nullptr) ::munmap(fault_.at, kRegisteredBytes);
}

kvq_status CudaModelSide::register_memory(const char* what, void* at, Registered& out) {
  out.at = at;
  const cuda::Driver& driver = device_.driver();
  CUresult code =
      driver.mem_host_register(at, kRegisteredBytes, CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE);
  if (code != CUDA_SUCCESS) return device_.failed(what, error_of(code, "cuMemHostRegister"));
  code = driver.mem_host_get_device_pointer(&out.device, at, 0);
  if (code == CUDA_SUCCESS) return KVQ_OK;
  driver.mem_host_unregister(at);
  out.device = 0;
  return device_.failed(what, error_of(code, "cuMemHostGetDevicePointer"));
}

kvq_status CudaModelSide::attach() {
  void* page = ::mmap(nullptr, kRegisteredBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return fail(KVQ_ERR_SYSTEM, "mapping the fault word: %s", std::strerror(errno));
  ::madvise(page, kRegisteredBytes, MADV_DONTFORK);
  fault_.at = page;
  const ContextScope scope(device_);
  const UncapturedScope uncaptured;
  if (auto s = start("kvq_register_model", scope); s != KVQ_OK) return s;
  if (auto s = register_memory("registering the step slots", segment_.step, steps_); s != KVQ_OK) return s;
  if (auto s = register_memory("registering the fault word", fault_.at, fault_); s != KVQ_OK) return s;
  const CUresult code = device_.driver().stream_create_with_priority(&stream_, CU_STREAM_NON_BLOCKING, 0);
  return code == CUDA_SUCCESS ? KVQ_OK : device_.failed("making a stream", error_of(code, "cuStreamCreate"));
}

kvq_status CudaModelSide::start(const char* call, const ContextScope& scope) {
  if (scope.code() == CUDA_SUCCESS) return KVQ_OK;
  return device_.failed(call, error_of(scope.code(), "cuCtxPushCurrent"));
}

kvq_status CudaModelSide::check_context() {
  const UncapturedScope uncaptured;
  return device_.check_same("this model");
}

kvq_status CudaModelSide::ask_context() {
  const UncapturedScope uncaptured;
  if (auto s = device_.check_same("this model"); s != KVQ_OK) return s;  // else stream_ is no pointer any more
  const ContextScope scope(device_);
  if (auto s = start("this model", scope); s != KVQ_OK) return s;
  const CUresult code = device_.driver().stream_query(stream_);
  if (code == CUDA_SUCCESS || code == CUDA_ERROR_NOT_READY) return KVQ_OK;
  return device_.failed("this model", error_of(code, "cuStreamQuery"));
}

kvq_status CudaModelSide::refuse_capture(const char* call, cuda::Stream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult code = device_.driver().stream_is_capturing(stream, &status);
  if (code == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE) return KVQ_OK;
  if (code == CUDA_SUCCESS || code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "%s: the stream is being captured; call it outside the graph", call);
  }
  if (code == CUDA_ERROR_INVALID_HANDLE || code == CUDA_ERROR_INVALID_CONTEXT) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "%s: the stream is not one of the pages' GPU", call);
  }
  return device_.failed(call, error_of(code, "cuStreamIsCapturing"));
}

kvq_status CudaModelSide::end_step(StepSlot& slot, std::uint64_t serial, void* stream) {
  if (auto s = check_known(); s != KVQ_OK) return s;
  const auto on = static_cast<cuda::Stream>(stream);
  const ContextScope scope(device_);
  if (auto s = start("kvq_step_end", scope); s != KVQ_OK) return s;
  if (auto s = refuse_capture("kvq_step_end", on); s != KVQ_OK) return s;
  const auto offset = reinterpret_cast<std::byte*>(&slot.ended) - static_cast<std::byte*>(steps_.at);
  const CUresult code = device_.driver().stream_write_value64(on, steps_.device + static_cast<std::uint64_t>(offset),
                                                              serial, CU_STREAM_WRITE_VALUE_DEFAULT);
  return code == CUDA_SUCCESS ? KVQ_OK : device_.failed("kvq_step_end", error_of(code, "cuStreamWriteValue64"));
}

kvq_status CudaModelSide::append(AppendCall call, const kvq_append_args& args, const Aliases&) {
  if (auto s = check_known(); s != KVQ_OK) return s;
  const ContextScope scope(device_);
  if (auto s = start("kvq_append", scope); s != KVQ_OK) return s;
  cuda::Launch launch{.stream = static_cast<cuda::Stream>(args.stream),
                      .fault = reinterpret_cast<std::uint64_t*>(fault_.device)};
  if (args.slots_are_aliases != 0) {
    if (auto s = make_alias_table(); s != KVQ_OK) return s;
    launch.aliases = alias_table_.load(std::memory_order_acquire);
    launch.alias_count = kMaxAlias + 1;
  }
  const auto done = cuda::append(call, launch);
  return done ? KVQ_OK : device_.failed(in_layer("kvq_append", args.layer).c_str(), done.error());
}

kvq_status CudaModelSide::attend(AttentionCall call, const kvq_attend_args& args, const Aliases&) {
  if (auto s = check_known(); s != KVQ_OK) return s;
  const ContextScope scope(device_);
  if (auto s = start("kvq_attend", scope); s != KVQ_OK) return s;
  cuda::Launch launch{.stream = static_cast<cuda::Stream>(args.stream),
                      .fault = reinterpret_cast<std::uint64_t*>(fault_.device),
                      .workspace = args.workspace,
                      .workspace_bytes = args.workspace_bytes,
                      .max_query_tokens = args.max_query_tokens};
  if (args.workspace == nullptr) {
    if (auto s = make_workspace(args.workspace_bytes); s != KVQ_OK) return s;
    launch.workspace = workspace_.load(std::memory_order_acquire);
    launch.workspace_bytes = workspace_bytes_;
  }
  if (args.table_has_aliases != 0) {
    if (auto s = make_alias_table(); s != KVQ_OK) return s;
    launch.aliases = alias_table_.load(std::memory_order_acquire);
    launch.alias_count = kMaxAlias + 1;
  }
  const auto done = cuda::attend(call, launch);
  return done ? KVQ_OK : device_.failed(in_layer("kvq_attend", args.layer).c_str(), done.error());
}

kvq_status CudaModelSide::merge(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint64_t rows,
                                std::uint32_t head_dim, void* stream) {
  if (auto s = check_known(); s != KVQ_OK) return s;
  const ContextScope scope(device_);
  if (auto s = start("kvq_merge_states_on", scope); s != KVQ_OK) return s;
  const auto done = cuda::merge_states(out_a, lse_a, out_b, lse_b, rows, head_dim, static_cast<cuda::Stream>(stream));
  return done ? KVQ_OK : device_.failed("kvq_merge_states_on", done.error());
}

kvq_status CudaModelSide::copy_page(const ModelView& model, const PageCopy& copy) {
  if (auto s = check_known(); s != KVQ_OK) return s;
  const std::lock_guard lock(mutex_);
  const ContextScope scope(device_);
  const UncapturedScope uncaptured;
  const std::string call = "copying page " + std::to_string(raw(copy.page));
  if (auto s = start(call.c_str(), scope); s != KVQ_OK) return s;
  if (transcoder_ == nullptr) {
    auto made = cuda::Transcoder::create(1, 1, stream_);
    if (!made) return device_.failed(call.c_str(), made.error());
    transcoder_ = std::move(*made);
  }
  const cuda::PageJob job{.source = device_.arena() + copy.source_bytes,
                          .destination = device_.arena() + copy.destination_bytes};
  const auto ticket = transcoder_->launch(*model.geometry, copy.from, &copy.to, {&job, 1});
  if (!ticket) return device_.failed(call.c_str(), ticket.error());
  if (const CUresult code = device_.driver().stream_synchronize(stream_); code != CUDA_SUCCESS)
    return device_.failed(call.c_str(), error_of(code, "cuStreamSynchronize"));
  const auto over = transcoder_->is_done(*ticket);
  if (!over) return device_.failed(call.c_str(), over.error());
  cuda::PageJobDone result;
  transcoder_->collect(*ticket, {&result, 1});
  if (result.code == Errc::ok) return KVQ_OK;
  return fail(static_cast<kvq_status>(result.code), "%s: its values cannot be rewritten", call.c_str());
}

kvq_status CudaModelSide::make_alias_table() {
  if (alias_table_.load(std::memory_order_acquire) != nullptr) return KVQ_OK;
  const std::lock_guard lock(mutex_);
  if (alias_table_.load(std::memory_order_relaxed) != nullptr) return KVQ_OK;
  const UncapturedScope uncaptured;
  void* table = nullptr;
  if (const cudaError_t code = cudaMalloc(&table, kAliasBytes); code != cudaSuccess)
    return device_.failed("making the table of aliases (64 MiB)", error_of(code, "cudaMalloc"));
  const cuda::Driver& driver = device_.driver();
  CUresult code = driver.memset_d8_async(reinterpret_cast<CUdeviceptr>(table), 0, kAliasBytes, stream_);
  if (code == CUDA_SUCCESS) code = driver.stream_synchronize(stream_);
  if (code != CUDA_SUCCESS) return device_.failed("clearing the table of aliases", error_of(code, "cuMemsetD8Async"));
  alias_table_.store(static_cast<std::int32_t*>(table), std::memory_order_release);
  return KVQ_OK;
}

kvq_status CudaModelSide::make_workspace(std::size_t bytes) {
  if (workspace_.load(std::memory_order_acquire) != nullptr || bytes == 0) return KVQ_OK;
  const std::lock_guard lock(mutex_);
  if (workspace_.load(std::memory_order_relaxed) != nullptr) return KVQ_OK;
  const UncapturedScope uncaptured;
  void* made = nullptr;
  if (const cudaError_t code = cudaMalloc(&made, bytes); code != cudaSuccess)
    return device_.failed("making the model's workspace", error_of(code, "cudaMalloc"));
  workspace_bytes_ = bytes;
  workspace_.store(made, std::memory_order_release);
  return KVQ_OK;
}

kvq_status CudaModelSide::show_aliases(const kvq_alias* aliases, std::size_t count, void* stream) {
  if (auto s = check_known(); s != KVQ_OK) return s;
  const auto on = static_cast<cuda::Stream>(stream);
  const ContextScope scope(device_);
  if (auto s = start("kvq_set_aliases", scope); s != KVQ_OK) return s;
  if (auto s = refuse_capture("kvq_set_aliases_on", on); s != KVQ_OK) return s;
  if (auto s = make_alias_table(); s != KVQ_OK) return s;
  const auto table = reinterpret_cast<CUdeviceptr>(alias_table_.load(std::memory_order_acquire));
  std::vector<CUstreamBatchMemOpParams> writes;
  for (std::size_t first = 0; first < count; first += kWritesAtOnce) {
    writes.assign(std::min(kWritesAtOnce, count - first), {});
    for (std::size_t i = 0; i < writes.size(); ++i) {
      const kvq_alias& alias = aliases[first + i];
      writes[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
      writes[i].writeValue.address = table + static_cast<std::uint64_t>(alias.alias) * sizeof(std::int32_t);
      writes[i].writeValue.value = static_cast<std::uint32_t>(alias.page);
    }
    const CUresult code =
        device_.driver().stream_batch_mem_op(on, static_cast<unsigned>(writes.size()), writes.data(), 0);
    if (code != CUDA_SUCCESS) return device_.failed("kvq_set_aliases", error_of(code, "cuStreamBatchMemOp"));
  }
  return KVQ_OK;
}

kvq_status CudaModelSide::show_aliases_now(const kvq_alias* aliases, std::size_t count) {
  if (auto s = show_aliases(aliases, count, stream_); s != KVQ_OK) return s;
  const ContextScope scope(device_);
  const UncapturedScope uncaptured;
  const CUresult code = device_.driver().stream_synchronize(stream_);
  return code == CUDA_SUCCESS ? KVQ_OK : device_.failed("kvq_set_aliases", error_of(code, "cuStreamSynchronize"));
}

kvq_status CudaModelSide::workspace_bytes(const ModelView& model, std::uint32_t query_heads, std::size_t& bytes) {
  if (auto s = check_known(); s != KVQ_OK) return s;
  const ContextScope scope(device_);
  const auto wanted = cuda::workspace_bytes(model, query_heads);
  if (!wanted) return device_.failed("kvq_attend_workspace_bytes", wanted.error());
  bytes = *wanted;
  return KVQ_OK;
}

void CudaModelSide::take_fault(kvq_fault& out) {
  const std::uint64_t word =
      std::atomic_ref(*static_cast<std::uint64_t*>(fault_.at)).exchange(0, std::memory_order_acq_rel);
  if (word == 0) return;
  out.status = static_cast<kvq_status>(word >> 56);
  out.layer = (word >> 48) & 0xff;
  out.index = (word >> 32) & 0xffff;
  out.page = static_cast<std::int32_t>(word & 0xffff'ffff);
}

kvq_status CudaSide::make_model_side(Segment& segment, std::unique_ptr<ModelSide>& out) {
  auto made = std::make_unique<CudaModelSide>(*this, segment);
  if (auto s = made->attach(); s != KVQ_OK) return s;
  out = std::move(made);
  return KVQ_OK;
}

}  // namespace kvq::client
