// The CUDA device as this process has it: slabs and the directory's mirror imported into one range of GPU addresses,
// or, where kvqd has no descriptors of such memory but handle files, the whole arena opened at the driver's place for
// it.
//
// Invariant: the GPU's primary context is current in every driver call made here, on whatever thread (ContextScope),
// and the thread that had another gets it back. A context that was lost, by a fault or by somebody's cudaDeviceReset,
// stays lost for this side: nothing more is mapped, and what is left of its memory is given back when the side ends.
// arena() stays the same once a mirror or a slab is mapped, since captured graphs have it; so a legacy arena is open
// until the side ends.
#pragma once

#include <cuda.h>

#include <atomic>
#include <map>
#include <string>

#include "client/device.h"
#include "kernels/cuda/legacy_memory.h"
#include "kernels/cuda/vmm.h"

namespace kvq::client {

class CudaSide final : public DeviceSide {
 public:
  CudaSide(std::uint64_t arena_bytes, std::uint64_t slab_bytes, std::string uuid);
  ~CudaSide() override;

  kvq_status open() override;
  kvq_status map(std::uint32_t slab, int fd, bool writable) override;
  void unmap(std::uint32_t slab) override;
  kvq_status map_mirror(int fd, std::uint64_t bytes) override;
  std::byte* arena() const override { return arena_.load(std::memory_order_acquire); }
  const DirectoryEntry* mirror() const override { return mirror_entries_.load(std::memory_order_acquire); }
  bool ends_with_daemon() const override { return legacy_arena_.base() != 0; }
  kvq_status make_model_side(Segment& segment, std::unique_ptr<ModelSide>& out) override;

  // Any thread, once open.
  const cuda::Driver& driver() const { return *driver_; }
  CUcontext context() const { return context_.load(std::memory_order_acquire); }
  bool lost() const { return lost_native_.load(std::memory_order_acquire) != 0; }
  // The call failed with `native`: CONTEXT_LOST once the context is broken, else SYSTEM or NO_MEMORY.
  kvq_status failed(const char* call, const Error& error);
  // The context is the one that was made here, and not one that came after a reset; else CONTEXT_LOST. Follows no
  // pointer that a reset may have made invalid.
  kvq_status check_same(const char* call);
  // The text of CONTEXT_LOST.
  kvq_status say_lost(const char* call) const;

 private:
  kvq_status retain();
  kvq_status import(const char* what, const cuda::AddressRange& range, std::uint64_t offset, std::uint64_t bytes,
                    int fd, cuda::Access access, cuda::Mapping& out);
  // Of handle files; the context is current.
  kvq_status open_arena(const char* what, const cuda::LegacyPart& part);
  kvq_status map_legacy(std::uint32_t slab, int fd);
  kvq_status map_legacy_mirror(int fd, std::uint64_t bytes);

  const std::uint64_t arena_bytes_, slab_bytes_;
  const std::string uuid_;
  const cuda::Driver* driver_ = nullptr;  // set by open, as device_ is
  CUdevice device_ = 0;
  std::atomic<CUcontext> context_{nullptr};
  unsigned long long context_id_ = 0;  // no other context of the process ever has it
  std::atomic<int> lost_native_{0};    // driver's code; 0: not lost
  cuda::AddressRange range_, mirror_range_;
  std::map<std::uint32_t, cuda::Mapping> slabs_;
  cuda::Mapping mirror_;
  cuda::LegacyImport legacy_arena_, legacy_mirror_;
  CUipcMemHandle arena_handle_{};  // of legacy_arena_
  std::atomic<std::byte*> arena_{nullptr};
  std::atomic<const DirectoryEntry*> mirror_entries_{nullptr};
};

// The side's context is current in this scope.
class ContextScope {
 public:
  explicit ContextScope(const CudaSide& side);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  CUresult code() const { return code_; }

 private:
  const cuda::Driver& driver_;
  bool pushed_ = false;
  CUresult code_ = CUDA_SUCCESS;
};

// Calls that could disturb a capture on another stream do not, in this scope of this thread.
class UncapturedScope {
 public:
  UncapturedScope();
  ~UncapturedScope();
  UncapturedScope(const UncapturedScope&) = delete;
  UncapturedScope& operator=(const UncapturedScope&) = delete;

 private:
  int mode_;
};

}  // namespace kvq::client
