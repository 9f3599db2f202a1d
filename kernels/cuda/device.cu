// The current device, and whether this build has code for it.
#include <cstdio>

#include "kernels/cuda/device_info.h"

namespace kvq::cuda {
namespace {

__global__ void probe() {}  // exists for exactly the architectures of this build

}  // namespace

Error as_error(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return {};
  return {Errc::system, static_cast<int>(status), what};
}

Result<DeviceInfo> current_device() {
  static thread_local DeviceInfo known{-1, 0, 0, 0, 0};
  int device = 0;
  if (Error error = as_error(cudaGetDevice(&device), "no CUDA device"); error.code != Errc::ok) return error;
  if (device == known.device) return known;
  int count = 0, bytes = 0;
  DeviceInfo info{device, 0, 0, 0, 0};
  cudaError_t status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&info.major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&info.minor, cudaDevAttrComputeCapabilityMinor, device);
  if (Error error = as_error(status, "attributes of the CUDA device"); error.code != Errc::ok) return error;
  info.multiprocessors = static_cast<std::uint32_t>(count);
  info.shared_bytes = static_cast<std::uint32_t>(bytes);
  return known = info;
}

Result<void> check_device() {
  const Result<DeviceInfo> device = current_device();
  if (!device) return device.error();
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe);
  if (status == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  static thread_local char text[128];
  std::snprintf(text, sizeof text, "no code for compute capability %d.%d; this build has %s", device->major,
                device->minor, KVQ_CUDA_ARCHITECTURES);
  return Error{Errc::system, static_cast<int>(status), text};
}

}  // namespace kvq::cuda
