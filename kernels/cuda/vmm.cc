// Calls of the driver's virtual memory functions. Destructors ignore errors: in a broken context, whose memory the
// driver takes back when the process ends, nothing else can be done.
#include "kernels/cuda/vmm.h"

#include <fcntl.h>

#include <cstdio>

namespace kvq::cuda {
namespace {

CUmemAllocationProp exportable(CUdevice device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

std::string uuid_text(const CUuuid& uuid, const std::string& name) {
  // The driver has one kind of UUID; only the name tells that the device is an instance ("NVIDIA H200 MIG 1g.18gb").
  std::string out = name.find(" MIG ") != std::string::npos ? "MIG" : "GPU";
  for (std::size_t i = 0; i < sizeof uuid.bytes; ++i) {
    char byte[4];
    std::snprintf(byte, sizeof byte, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) out += '-';
    out += byte;
  }
  return out;
}

}  // namespace

Result<std::vector<Gpu>> visible_gpus() {
  const Result<const Driver*> found = driver();
  if (!found) return found.error();
  const Driver& d = **found;
  int count = 0;
  if (const CUresult code = d.device_get_count(&count)) return driver_error(code, "counting the GPUs");
  std::vector<Gpu> out;
  for (int i = 0; i < count; ++i) {
    Gpu gpu;
    CUuuid uuid{};
    char name[256] = "";
    std::size_t total = 0;
    CUresult code = d.device_get(&gpu.device, i);
    if (!code) code = d.device_get_name(name, sizeof name, gpu.device);
    if (!code) code = d.device_get_uuid(&uuid, gpu.device);
    if (!code) code = d.device_total_mem(&total, gpu.device);
    if (code) return driver_error(code, "asking a GPU for its name");
    gpu.name = name;
    gpu.uuid = uuid_text(uuid, gpu.name);
    gpu.total_bytes = total;
    out.push_back(std::move(gpu));
  }
  return out;
}

Result<Gpu> find_gpu(const std::string& uuid) {
  Result<std::vector<Gpu>> gpus = visible_gpus();
  if (!gpus) return gpus.error();
  for (Gpu& gpu : *gpus) {
    if (gpu.uuid == uuid) return std::move(gpu);
  }
  return Error{Errc::system, CUDA_ERROR_INVALID_DEVICE,
               "no visible GPU has this UUID; see CUDA_VISIBLE_DEVICES and the container"};
}

Result<bool> exports_descriptors(CUdevice device) {
  const Result<const Driver*> d = driver();
  if (!d) return d.error();
  int exports = 0;
  const CUresult code =
      (*d)->device_get_attribute(&exports, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
  if (code) return driver_error(code, "cuDeviceGetAttribute");
  return exports != 0;
}

Result<std::uint64_t> vmm_granularity(CUdevice device) {
  const Result<bool> exports = exports_descriptors(device);
  if (!exports) return exports.error();
  if (!*exports) {
    return Error{Errc::system, CUDA_ERROR_NOT_SUPPORTED,
                 "this GPU's memory cannot be passed to other processes as a descriptor"};
  }
  const Result<const Driver*> d = driver();
  const CUmemAllocationProp prop = exportable(device);
  std::size_t bytes = 0;
  const CUresult code = (*d)->mem_get_allocation_granularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (code) return driver_error(code, "cuMemGetAllocationGranularity");
  return std::uint64_t{bytes};
}

Result<Physical> Physical::create(CUdevice device, std::uint64_t bytes) {
  const Result<const Driver*> d = driver();
  if (!d) return d.error();
  const CUmemAllocationProp prop = exportable(device);
  CUmemGenericAllocationHandle handle = 0;
  if (const CUresult code = (*d)->mem_create(&handle, bytes, &prop, 0)) return driver_error(code, "cuMemCreate");
  return Physical(handle);
}

Result<Physical> Physical::import(int fd) {
  const Result<const Driver*> d = driver();
  if (!d) return d.error();
  CUmemGenericAllocationHandle handle = 0;
  void* const os_handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd));
  const CUresult code =
      (*d)->mem_import_from_shareable_handle(&handle, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  // A descriptor of something else gives "unknown error", and the context is as good as before.
  if (code == CUDA_ERROR_UNKNOWN) return Error{Errc::system, code, "not a descriptor of device memory"};
  if (code) return driver_error(code, "cuMemImportFromShareableHandle");
  return Physical(handle);
}

Result<int> Physical::export_fd() const {
  const Result<const Driver*> d = driver();
  if (!d) return d.error();
  int fd = -1;
  if (const CUresult code =
          (*d)->mem_export_to_shareable_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)) {
    return driver_error(code, "cuMemExportToShareableHandle");
  }
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

Physical::~Physical() {
  if (handle_ != 0) (*driver())->mem_release(handle_);
}

Mapping::~Mapping() {
  if (base_ != 0) (*driver())->mem_unmap(base_, bytes_);
}

Result<AddressRange> AddressRange::reserve(CUdevice device, std::uint64_t bytes) {
  const Result<const Driver*> d = driver();
  if (!d) return d.error();
  CUdeviceptr base = 0;
  if (const CUresult code = (*d)->mem_address_reserve(&base, bytes, 0, 0, 0))
    return driver_error(code, "cuMemAddressReserve");
  return AddressRange(device, base, bytes);
}

AddressRange::~AddressRange() {
  if (base_ != 0) (*driver())->mem_address_free(base_, bytes_);
}

Result<Mapping> AddressRange::map(std::uint64_t offset, std::uint64_t bytes, const Physical& memory,
                                  Access access) const {
  KVQ_ASSERT(offset <= bytes_ && bytes <= bytes_ - offset);
  const Result<const Driver*> d = driver();
  if (!d) return d.error();
  if (const CUresult code = (*d)->mem_map(base_ + offset, bytes, 0, memory.handle(), 0))
    return driver_error(code, "cuMemMap");
  Mapping out(base_ + offset, bytes);  // from here on an error unmaps
  CUmemAccessDesc rights{};
  rights.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  rights.location.id = device_;
  rights.flags = access == Access::read_only ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (const CUresult code = (*d)->mem_set_access(base_ + offset, bytes, &rights, 1))
    return driver_error(code, "cuMemSetAccess");
  return out;
}

}  // namespace kvq::cuda
