// Device memory by the driver's virtual memory functions: physical memory that crosses processes as a descriptor,
// mapped anywhere.
//
// Invariant: each object gives back what it took, once. Physical memory lives while any process maps it or holds a
// descriptor of it, whoever made it. A mapping ends before its range does. The primary context of the device is current
// in every call.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/driver.h"

namespace kvq::cuda {

// --- devices -------------------------------------------------------------------------------------------------------

struct Gpu {
  CUdevice device = 0;
  std::string uuid;  // as nvidia-smi -L prints: "GPU-8d4f...-...", or "MIG-..." for an instance of a divided GPU
  std::string name;
  std::uint64_t total_bytes = 0;
};

// Those that this process may see. The same GPU has the same UUID in every process, whatever its number there.
Result<std::vector<Gpu>> visible_gpus();
Result<Gpu> find_gpu(const std::string& uuid);  // system: not among the visible ones

// Whether its memory can cross processes as a descriptor; where not (vGPU, WSL), kernels/cuda/legacy_memory.h is the
// way.
Result<bool> exports_descriptors(CUdevice device);
// What sizes and places of exportable memory are multiples of: 2 MiB on the GPUs of today.
Result<std::uint64_t> vmm_granularity(CUdevice device);

// --- memory --------------------------------------------------------------------------------------------------------

class Physical {
 public:
  // Zeroed, exportable. Errors: no_memory (the GPU is full), system.
  static Result<Physical> create(CUdevice device, std::uint64_t bytes);
  // Another process's, by its descriptor, which stays the caller's. Its size is not written in it: both sides know it.
  static Result<Physical> import(int fd);

  Physical() = default;
  Physical(Physical&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Physical& operator=(Physical&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Physical();

  Result<int> export_fd() const;  // a new descriptor, the caller's, closed by exec
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  explicit Physical(CUmemGenericAllocationHandle handle) : handle_(handle) {}
  CUmemGenericAllocationHandle handle_ = 0;
};

enum class Access { read_only, read_write };

// Memory at its addresses; it stays alive while it is mapped, even without its Physical.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept : base_(std::exchange(other.base_, 0)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  CUdeviceptr base() const { return base_; }  // 0: nothing is mapped

 private:
  friend class AddressRange;
  Mapping(CUdeviceptr base, std::uint64_t bytes) : base_(base), bytes_(bytes) {}
  CUdeviceptr base_ = 0;
  std::uint64_t bytes_ = 0;
};

class AddressRange {
 public:
  static Result<AddressRange> reserve(CUdevice device, std::uint64_t bytes);

  AddressRange() = default;
  AddressRange(AddressRange&& other) noexcept
      : device_(other.device_), base_(std::exchange(other.base_, 0)), bytes_(other.bytes_) {}
  AddressRange& operator=(AddressRange&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~AddressRange();

  // Maps all `bytes` of the memory at `offset` of this range, where nothing is mapped.
  Result<Mapping> map(std::uint64_t offset, std::uint64_t bytes, const Physical& memory, Access access) const;
  CUdeviceptr base() const { return base_; }

 private:
  AddressRange(CUdevice device, CUdeviceptr base, std::uint64_t bytes) : device_(device), base_(base), bytes_(bytes) {}
  CUdevice device_ = 0;
  CUdeviceptr base_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace kvq::cuda
