// What launches need to know of the current device, and errors from the runtime's.
//
// Invariant: asked of the runtime once for each thread and device; never a synchronizing call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/cuda_kernels.h"

namespace kvq::cuda {

struct DeviceInfo {
  int device;
  std::uint32_t multiprocessors;
  std::uint32_t shared_bytes;  // that one block may have
  int major, minor;
};

Result<DeviceInfo> current_device();

// Ok, or Errc::system with `what` and the runtime's code.
Error as_error(cudaError_t status, const char* what);
// Of the launches since the last call, on this thread.
inline Error launch_error(const char* what) { return as_error(cudaGetLastError(), what); }

}  // namespace kvq::cuda
