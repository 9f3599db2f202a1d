// Three ways to write words into device memory in stream order.
//
// Invariant: as in entries.h. A write operation of a stream fences as __threadfence_system() before it, the kernel
// stores with release semantics at system scope, a copy starts when what is before it has ended.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/entries.h"

namespace kvq::cuda {
namespace {

constexpr std::size_t kOperationsAtOnce = 255;  // the driver takes fewer than 256
constexpr std::size_t kWorthACopy = 256;

struct WriteList {  // travels as the kernel's parameters
  std::uint64_t words[kOperationsAtOnce];
  std::uint32_t indices[kOperationsAtOnce];
  std::uint32_t count;
};
static_assert(sizeof(WriteList) + sizeof(void*) <= 4096);

__global__ void store_entries(std::uint64_t* entries, const __grid_constant__ WriteList list) {
  const std::uint32_t i = threadIdx.x;
  if (i >= list.count) return;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(entries + list.indices[i]), "l"(list.words[i]) : "memory");
}

Result<void> write_by_kernel(std::uint64_t* entries, std::span<const EntryWrite> writes, Stream stream) {
  WriteList list;
  for (; !writes.empty(); writes = writes.subspan(list.count)) {
    list.count = static_cast<std::uint32_t>(std::min(writes.size(), kOperationsAtOnce));
    for (std::uint32_t i = 0; i < list.count; ++i) {
      list.words[i] = writes[i].word;
      list.indices[i] = writes[i].index;
    }
    store_entries<<<1, 256, 0, stream>>>(entries, list);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
      return driver_error(error, "launch of the kernel that writes directory entries");
    }
  }
  return {};
}

Result<void> write_by_operations(std::uint64_t* entries, std::span<const EntryWrite> writes, Stream stream) {
  const Result<const Driver*> found = driver();
  if (!found) return found.error();
  CUstreamBatchMemOpParams operations[kOperationsAtOnce];
  while (!writes.empty()) {
    const std::size_t count = std::min(writes.size(), kOperationsAtOnce);
    for (std::size_t i = 0; i < count; ++i) {
      operations[i] = {};
      operations[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
      operations[i].writeValue.address = reinterpret_cast<CUdeviceptr>(entries + writes[i].index);
      operations[i].writeValue.value64 = writes[i].word;
      operations[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    }
    const CUresult error = (*found)->stream_batch_mem_op(stream, static_cast<unsigned>(count), operations, 0);
    if (error != CUDA_SUCCESS) return driver_error(error, "write of directory entries in stream order");
    writes = writes.subspan(count);
  }
  return {};
}

bool consecutive(std::span<const EntryWrite> writes) {
  for (std::size_t i = 1; i < writes.size(); ++i) {
    if (writes[i].index != writes[0].index + i) return false;
  }
  return true;
}

Result<void> write_by_copy(std::uint64_t* entries, std::span<const EntryWrite> writes, Stream stream) {
  std::vector<std::uint64_t> words;
  words.reserve(writes.size());
  for (const EntryWrite& write : writes) words.push_back(write.word);
  // From pageable memory: the driver has taken the words over when the call returns.
  const cudaError_t error = cudaMemcpyAsync(entries + writes[0].index, words.data(), words.size() * sizeof(words[0]),
                                            cudaMemcpyHostToDevice, stream);
  if (error != cudaSuccess) return driver_error(error, "copy of directory entries");
  return {};
}

// Whether the current device has 64-bit memory operations of streams.
Result<bool> has_operations() {
  const Result<const Driver*> found = driver();
  if (!found) return found.error();
  int device = 0, has = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return driver_error(error, "no CUDA device for directory entries");
  const CUresult asked =
      (*found)->device_get_attribute(&has, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device);
  if (asked != CUDA_SUCCESS) return driver_error(asked, "memory operations of streams");
  return has != 0;
}

}  // namespace

Result<void> write_entries(std::uint64_t* entries, std::span<const EntryWrite> writes, Stream stream, EntryPath path) {
  if (writes.empty()) return {};
  const bool may_copy = path == EntryPath::copy || (path == EntryPath::automatic && writes.size() >= kWorthACopy);
  if (may_copy && consecutive(writes)) return write_by_copy(entries, writes, stream);
  if (path == EntryPath::copy) {
    return Error{Errc::invalid_argument, 0, "a copy writes consecutive directory entries only"};
  }
  if (path == EntryPath::automatic) {
    const Result<bool> has = has_operations();
    if (!has) return has.error();
    path = *has ? EntryPath::memory_operations : EntryPath::kernel;
  }
  return path == EntryPath::kernel ? write_by_kernel(entries, writes, stream)
                                   : write_by_operations(entries, writes, stream);
}

}  // namespace kvq::cuda
