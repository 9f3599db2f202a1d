// The device suite over a real GPU: kvqd's side in this process, kvqd-gpu beside it, importers that copy through CUDA.
#include "tests/device/conformance.h"

#include <cuda_runtime.h>

#include <filesystem>
#include <stdexcept>

#include "daemon/device/worker_device.h"
#include "daemon/gpu/worker_protocol.h"
#include "kernels/cuda/legacy_memory.h"
#include "kernels/cuda/vmm.h"

namespace kvq::testing {
namespace {

constexpr std::uint64_t kSlab = 2ull << 20, kArena = 4 * kSlab;

class DeviceBytes {
 public:
  DeviceBytes(int fd, std::uint64_t bytes, bool writable) {
    if (cudaFree(nullptr) != cudaSuccess) return;  // makes the context
    if (cuda::is_legacy_file(fd)) {
      open_legacy(fd, bytes);
      return;
    }
    const Result<cuda::Physical> memory = cuda::Physical::import(fd);
    Result<cuda::AddressRange> range = cuda::AddressRange::reserve(0, bytes);
    if (!memory || !range) return;
    range_ = std::move(*range);
    Result<cuda::Mapping> mapping =
        range_.map(0, bytes, *memory, writable ? cuda::Access::read_write : cuda::Access::read_only);
    if (!mapping) return;
    mapping_ = std::move(*mapping);
    base_ = mapping_.base();
  }
  bool ok() const { return base_ != 0; }
  void read(std::uint64_t offset, void* to, std::uint64_t count) const {
    EXPECT_EQ(cudaMemcpy(to, at(offset), count, cudaMemcpyDeviceToHost), cudaSuccess);
  }
  void write(std::uint64_t offset, const void* from, std::uint64_t count) const {
    EXPECT_EQ(cudaMemcpy(at(offset), from, count, cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // a small copy may still be on its way, and the mapping goes next
  }

 private:
  void* at(std::uint64_t offset) const { return reinterpret_cast<void*>(base_ + offset); }
  void open_legacy(int fd, std::uint64_t bytes) {
    const Result<cuda::LegacyPart> part = cuda::read_legacy_file(fd);
    if (!part || part->bytes != bytes) return;
    Result<cuda::LegacyImport> allocation = cuda::LegacyImport::open(part->handle);
    if (!allocation) return;
    allocation_ = std::move(*allocation);
    base_ = allocation_.base() + part->offset;
  }

  cuda::AddressRange range_;
  cuda::Mapping mapping_;
  cuda::LegacyImport allocation_;
  CUdeviceptr base_ = 0;
};

template <gpu::Exporter kExporter>
struct Kind {
  using Bytes = DeviceBytes;
  static constexpr std::uint64_t kSlab = testing::kSlab, kGranularity = 2ull << 20;
  static constexpr bool kNarrows = false;  // the importer chooses; kvq's own maps what it only reads read-only
  static constexpr bool kOutlives = kExporter == gpu::Exporter::vmm;
  std::unique_ptr<Device> make() { return started(0); }
  std::unique_ptr<Device> make_next() { return started(kArena); }
  static std::unique_ptr<Device> started(std::uint64_t kept) {
    const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    MadeWorkerDevice made =
        make_worker_device({.command = {here / "kvqd-gpu", "--uuid", "", "--export", gpu::name(kExporter)},
                            .slab_bytes = kSlab,
                            .arena_bytes = kArena,
                            .kept_arena_bytes = kept});
    if (made.device == nullptr) throw std::runtime_error(made.why_not);
    return std::move(made.device);
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Vmm, DeviceConformance, Kind<gpu::Exporter::vmm>);
INSTANTIATE_TYPED_TEST_SUITE_P(Legacy, DeviceConformance, Kind<gpu::Exporter::legacy>);

}  // namespace
}  // namespace kvq::testing
