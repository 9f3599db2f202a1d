// Invariant: calls come under TenantMemory's mutex, on the loop thread or on a caller's; a range is never moved while
// something is mapped in it.
#include "client/cuda_side.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "client/fork_guard.h"
#include "client/last_error.h"
#include "kernels/cuda/cuda_kernels.h"

namespace kvq::client {
namespace {

// The process that first used CUDA here: its children cannot.
std::atomic<std::uint64_t> first_user{0};

kvq_status check_fork() {
  std::uint64_t first = 0;
  if (first_user.compare_exchange_strong(first, fork_generation()) || first == fork_generation()) return KVQ_OK;
  return fail(KVQ_ERR_FORKED,
              "the parent of this process used CUDA before the fork, so that this process cannot; start processes that "
              "use the GPU by exec (multiprocessing: \"spawn\")");
}

// A context is gone when the driver says so, and also when somebody has reset it.
bool means_lost(int native) {
  return cuda::is_context_lost(native) || native == CUDA_ERROR_INVALID_CONTEXT ||
         native == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

kvq_status say(const char* what, const Error& error) {
  return fail(static_cast<kvq_status>(error.code), "%s: %s: %s", what, error.context, cuda::driver_text(error.native));
}

}  // namespace

ContextScope::ContextScope(const CudaSide& side) : driver_(side.driver()) {
  CUcontext now = nullptr;
  const CUcontext wanted = side.context();
  if (wanted == nullptr) {  // a reset has taken it
    code_ = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return;
  }
  if (driver_.ctx_get_current(&now) == CUDA_SUCCESS && now == wanted) return;
  code_ = driver_.ctx_push_current(wanted);
  pushed_ = code_ == CUDA_SUCCESS;
}

ContextScope::~ContextScope() {
  CUcontext popped = nullptr;
  if (pushed_) driver_.ctx_pop_current(&popped);
}

UncapturedScope::UncapturedScope() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  mode_ = static_cast<int>(mode);
}

UncapturedScope::~UncapturedScope() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  cudaThreadExchangeStreamCaptureMode(&mode);
}

CudaSide::CudaSide(std::uint64_t arena_bytes, std::uint64_t slab_bytes, std::string uuid)
    : arena_bytes_(arena_bytes), slab_bytes_(slab_bytes), uuid_(std::move(uuid)) {}

CudaSide::~CudaSide() {
  if (context() == nullptr) return;
  static_cast<void>(check_same("closing"));
  const ContextScope scope(*this);
  const UncapturedScope uncaptured;
  slabs_.clear();
  mirror_ = {};
  range_ = {};
  mirror_range_ = {};
  legacy_mirror_ = {};
  legacy_arena_ = {};
  if (context() != nullptr) driver_->primary_ctx_release(device_);
}

kvq_status CudaSide::open() {
  if (lost() || context() != nullptr) return check_same("kvq_register_model");
  if (auto s = check_fork(); s != KVQ_OK) return s;
  const auto driver = cuda::driver();
  if (!driver) {
    return fail(KVQ_ERR_SYSTEM, "kvqd keeps its pages on GPU %s: %s", uuid_.c_str(), driver.error().context);
  }
  driver_ = *driver;
  const auto gpus = cuda::visible_gpus();
  if (!gpus) return say("looking for kvqd's GPU", gpus.error());
  std::vector<std::string> uuids;
  for (const cuda::Gpu& gpu : *gpus) uuids.push_back(gpu.uuid);
  std::size_t index = 0;
  if (auto s = choose_device(uuid_, uuids, std::getenv("CUDA_VISIBLE_DEVICES"), index); s != KVQ_OK) return s;
  device_ = (*gpus)[index].device;
  return retain();
}

// The primary context, and the range of addresses in it, on a GPU that has descriptors to map there.
kvq_status CudaSide::retain() {
  CUcontext context = nullptr;
  if (const CUresult code = driver_->primary_ctx_retain(&context, device_); cuda::is_context_lost(code)) {
    return fail(KVQ_ERR_CONTEXT_LOST,
                "the driver gives this process no context on GPU %s any more (%s); start the process anew",
                uuid_.c_str(), cuda::driver_text(code));
  } else if (code != CUDA_SUCCESS) {
    return fail(KVQ_ERR_SYSTEM, "making a context on GPU %s: %s; if it is busy, try again in a moment", uuid_.c_str(),
                cuda::driver_text(code));
  }
  context_.store(context, std::memory_order_release);
  const auto give_up = [&](kvq_status why) {
    driver_->primary_ctx_release(device_);
    context_.store(nullptr, std::memory_order_release);
    return why;
  };
  const ContextScope scope(*this);
  const UncapturedScope uncaptured;
  CUresult code = driver_->ctx_synchronize();
  if (code == CUDA_SUCCESS) code = driver_->ctx_get_id(context, &context_id_);
  if (code != CUDA_SUCCESS) {
    return give_up(fail(KVQ_ERR_CONTEXT_LOST, "the context on GPU %s is broken (%s): start the process anew",
                        uuid_.c_str(), cuda::driver_text(code)));
  }
  if (const auto fits = cuda::check_device(); !fits) {
    return give_up(fail(KVQ_ERR_SYSTEM, "GPU %s: %s", uuid_.c_str(), fits.error().context));
  }
  const auto descriptors = cuda::exports_descriptors(device_);
  if (!descriptors) return give_up(say("asking the GPU what it can", descriptors.error()));
  if (!*descriptors) return KVQ_OK;
  auto range = cuda::AddressRange::reserve(device_, arena_bytes_);
  if (!range) return give_up(say("reserving GPU addresses for the arena", range.error()));
  range_ = std::move(*range);
  arena_.store(reinterpret_cast<std::byte*>(range_.base()), std::memory_order_release);
  return KVQ_OK;
}

kvq_status CudaSide::import(const char* what, const cuda::AddressRange& range, std::uint64_t offset,
                            std::uint64_t bytes, int fd, cuda::Access access, cuda::Mapping& out) {
  const auto physical = cuda::Physical::import(fd);
  if (!physical) return failed(what, physical.error());
  auto mapping = range.map(offset, bytes, *physical, access);
  if (!mapping) return failed(what, mapping.error());
  out = std::move(*mapping);
  return KVQ_OK;
}

// With a lost context the slab has no mapping, and the session goes on: whatever would touch the slab is refused.
kvq_status CudaSide::map(std::uint32_t slab, int fd, bool writable) {
  unmap(slab);
  if (lost()) return KVQ_OK;
  const ContextScope scope(*this);
  const UncapturedScope uncaptured;
  if (cuda::is_legacy_file(fd)) {
    const auto opened = map_legacy(slab, fd);
    return opened == KVQ_ERR_CONTEXT_LOST ? KVQ_OK : opened;
  }
  cuda::Mapping mapping;
  const auto imported = import("mapping a slab of GPU memory", range_, slab * slab_bytes_, slab_bytes_, fd,
                               writable ? cuda::Access::read_write : cuda::Access::read_only, mapping);
  if (imported == KVQ_OK) slabs_[slab] = std::move(mapping);
  return imported == KVQ_ERR_CONTEXT_LOST ? KVQ_OK : imported;
}

void CudaSide::unmap(std::uint32_t slab) {
  const auto known = slabs_.find(slab);
  if (known == slabs_.end()) return;
  const ContextScope scope(*this);
  const UncapturedScope uncaptured;
  slabs_.erase(known);
}

kvq_status CudaSide::map_mirror(int fd, std::uint64_t bytes) {
  if (mirror() != nullptr || lost()) return KVQ_OK;
  const ContextScope scope(*this);
  const UncapturedScope uncaptured;
  if (cuda::is_legacy_file(fd)) return map_legacy_mirror(fd, bytes);
  const auto unit = cuda::vmm_granularity(device_);
  if (!unit) return failed("mapping the directory's mirror", unit.error());
  bytes = (bytes + *unit - 1) / *unit * *unit;  // as it was allocated
  auto range = cuda::AddressRange::reserve(device_, bytes);
  if (!range) return failed("reserving GPU addresses for the directory's mirror", range.error());
  mirror_range_ = std::move(*range);
  if (auto s = import("mapping the directory's mirror", mirror_range_, 0, bytes, fd, cuda::Access::read_only, mirror_);
      s != KVQ_OK)
    return s;
  mirror_entries_.store(reinterpret_cast<const DirectoryEntry*>(mirror_range_.base()), std::memory_order_release);
  return KVQ_OK;
}

kvq_status CudaSide::open_arena(const char* what, const cuda::LegacyPart& part) {
  if (legacy_arena_.base() != 0) {
    if (cuda::same_handle(part.arena, arena_handle_)) return KVQ_OK;
    return fail(KVQ_ERR_VERSION_MISMATCH, "%s: kvqd names another arena than before", what);
  }
  if (!slabs_.empty()) return fail(KVQ_ERR_VERSION_MISMATCH, "%s: kvqd sent a handle among descriptors", what);
  auto arena = cuda::LegacyImport::open(part.arena);
  if (!arena) return failed(what, arena.error());
  legacy_arena_ = std::move(*arena);
  arena_handle_ = part.arena;
  arena_.store(reinterpret_cast<std::byte*>(legacy_arena_.base()), std::memory_order_release);
  return KVQ_OK;
}

// Its place is in the arena already, which is mapped as a whole.
kvq_status CudaSide::map_legacy(std::uint32_t slab, int fd) {
  constexpr const char* kWhat = "opening a slab of GPU memory by its handle";
  const auto part = cuda::read_legacy_file(fd);
  if (!part) return failed(kWhat, part.error());
  if (!cuda::same_handle(part->handle, part->arena) || part->allocation_bytes != arena_bytes_ ||
      part->offset != slab * slab_bytes_ || part->bytes != slab_bytes_) {
    return fail(KVQ_ERR_VERSION_MISMATCH, "slab %u: its handle is that of %llu bytes at %llu of %llu", slab,
                static_cast<unsigned long long>(part->bytes), static_cast<unsigned long long>(part->offset),
                static_cast<unsigned long long>(part->allocation_bytes));
  }
  return open_arena(kWhat, *part);
}

kvq_status CudaSide::map_legacy_mirror(int fd, std::uint64_t bytes) {
  constexpr const char* kWhat = "opening the directory's mirror by its handle";
  const auto part = cuda::read_legacy_file(fd);
  if (!part) return failed(kWhat, part.error());
  if (part->bytes < bytes) {
    return fail(KVQ_ERR_VERSION_MISMATCH, "the directory's mirror has %llu bytes, expected %llu",
                static_cast<unsigned long long>(part->bytes), static_cast<unsigned long long>(bytes));
  }
  if (auto s = open_arena(kWhat, *part); s != KVQ_OK) return s;
  auto mirror = cuda::LegacyImport::open(part->handle);
  if (!mirror) return failed(kWhat, mirror.error());
  legacy_mirror_ = std::move(*mirror);
  mirror_entries_.store(reinterpret_cast<const DirectoryEntry*>(legacy_mirror_.base() + part->offset),
                        std::memory_order_release);
  return KVQ_OK;
}

kvq_status CudaSide::failed(const char* call, const Error& error) {
  if (!means_lost(error.native) && error.code != Errc::context_lost) {
    if (error.native == 0) return fail(static_cast<kvq_status>(error.code), "%s: %s", call, error.context);
    return say(call, error);
  }
  int none = 0;
  const int native = error.native != 0 ? error.native : CUDA_ERROR_UNKNOWN;
  lost_native_.compare_exchange_strong(none, native);
  return say_lost(call);
}

kvq_status CudaSide::say_lost(const char* call) const {
  return fail(KVQ_ERR_CONTEXT_LOST,
              "%s: the context on GPU %s is lost (%s); start the process anew and open its sequences again: their "
              "sealed pages are attached under their keys",
              call, uuid_.c_str(), cuda::driver_text(lost_native_.load()));
}

kvq_status CudaSide::check_same(const char* call) {
  if (lost()) return say_lost(call);
  CUcontext now = nullptr;
  if (const CUresult code = driver_->primary_ctx_retain(&now, device_))
    return failed(call, {Errc::context_lost, static_cast<int>(code), "cuDevicePrimaryCtxRetain"});
  unsigned long long id = 0;
  const CUresult code = driver_->ctx_get_id(now, &id);
  driver_->primary_ctx_release(device_);
  if (code == CUDA_SUCCESS && id == context_id_) return KVQ_OK;
  context_.store(nullptr, std::memory_order_release);  // the reset has given it back for us
  return failed(call, {Errc::context_lost, CUDA_ERROR_CONTEXT_IS_DESTROYED, "cuCtxGetId"});
}

std::unique_ptr<DeviceSide> make_cuda_side(std::uint64_t arena_bytes, std::uint64_t slab_bytes,
                                           const std::string& uuid) {
  return std::make_unique<CudaSide>(arena_bytes, slab_bytes, uuid);
}

kvq_status find_visible_gpus(VisibleGpus& out) {
  if (auto s = check_fork(); s != KVQ_OK) return s;
  const auto driver = cuda::driver();
  if (!driver) return fail(KVQ_ERR_SYSTEM, "kvqd serves several GPUs: %s", driver.error().context);
  const auto gpus = cuda::visible_gpus();
  if (!gpus) {
    return fail(KVQ_ERR_SYSTEM, "looking for kvqd's GPUs: %s: %s", gpus.error().context,
                cuda::driver_text(gpus.error().native));
  }
  out.setting = std::getenv("CUDA_VISIBLE_DEVICES");
  CUcontext context = nullptr;
  CUdevice device = 0;
  const bool current = (*driver)->ctx_get_current(&context) == CUDA_SUCCESS && context != nullptr &&
                       (*driver)->ctx_get_device(&device) == CUDA_SUCCESS;
  for (std::size_t i = 0; i < gpus->size(); ++i) {
    if (current && (*gpus)[i].device == device) out.current = i;
    out.uuids.push_back((*gpus)[i].uuid);
  }
  return KVQ_OK;
}

}  // namespace kvq::client
