// Device memory by the driver's legacy IPC handles, for GPUs and drivers that cannot pass memory as a descriptor.
//
// Invariant: each object gives back what it took, once. A handle names a whole allocation and opens while its maker
// lives, in other processes alone, always for writing and at an address of the driver's choice. It travels in a handle
// file, a sealed memory file, so that every path that passes descriptors passes it; what a file offers was zeroed
// first. The primary context of the device is current in every call.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "kernels/cuda/driver.h"

namespace kvq::cuda {

// Of the sizes of allocations: smaller ones may share the driver's block with others, and a handle opens all of it.
inline constexpr std::uint64_t kLegacyGranularity = 2ull << 20;

// What a handle file says: bytes [offset, offset + bytes) of the allocation that the handle opens. Each also has the
// handle of the arena, so that an importer of a mirror knows where slabs will be before there is one.
struct LegacyPart {
  CUipcMemHandle handle{}, arena{};
  std::uint64_t allocation_bytes = 0;
  std::uint64_t offset = 0, bytes = 0;
};
bool same_handle(const CUipcMemHandle& a, const CUipcMemHandle& b);

// Whether the descriptor is a memory file, as handle files are and descriptors of device memory are not.
bool is_legacy_file(int fd);
// Errors (invalid_argument): no handle file, or one that was written by another release.
Result<LegacyPart> read_legacy_file(int fd);
// A descriptor of a new handle file, the caller's, closed by exec.
Result<int> write_legacy_file(const LegacyPart& part);

// An allocation of this process.
class LegacyMemory {
 public:
  // With whatever bytes were there. Errors: no_memory, system (this GPU has no such handles either).
  static Result<LegacyMemory> create(std::uint64_t bytes);

  LegacyMemory() = default;
  LegacyMemory(LegacyMemory&& other) noexcept
      : base_(std::exchange(other.base_, 0)), bytes_(other.bytes_), handle_(other.handle_) {}
  LegacyMemory& operator=(LegacyMemory&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~LegacyMemory();

  // Zeroes the part, waits for that, and gives a handle file of it.
  Result<int> export_zeroed(std::uint64_t offset, std::uint64_t bytes, const LegacyMemory& arena) const;
  CUdeviceptr base() const { return base_; }  // 0: nothing is there

 private:
  LegacyMemory(CUdeviceptr base, std::uint64_t bytes) : base_(base), bytes_(bytes) {}
  CUdeviceptr base_ = 0;
  std::uint64_t bytes_ = 0;
  CUipcMemHandle handle_{};
};

// Another process's allocation. The driver counts: opened twice it is at one address, until it was closed twice.
class LegacyImport {
 public:
  // Errors (system): its maker has ended, or is this process.
  static Result<LegacyImport> open(const CUipcMemHandle& handle);

  LegacyImport() = default;
  LegacyImport(LegacyImport&& other) noexcept : base_(std::exchange(other.base_, 0)) {}
  LegacyImport& operator=(LegacyImport&& other) noexcept {
    std::swap(base_, other.base_);
    return *this;
  }
  ~LegacyImport();

  CUdeviceptr base() const { return base_; }  // of the whole allocation; 0: nothing is open

 private:
  explicit LegacyImport(CUdeviceptr base) : base_(base) {}
  CUdeviceptr base_ = 0;
};

}  // namespace kvq::cuda
