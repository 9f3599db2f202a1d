// Launches that may begin before the work in front of them has ended; the kernels wait for it themselves.
#pragma once

#include "kernels/cuda/device_info.h"

namespace kvq::cuda {

// One block of a one-dimensional grid for each of `blocks`. `what` names the launch in an error.
template <typename Parameters>
Error launch_early(const DeviceInfo& device, cudaStream_t stream, std::uint32_t blocks, std::uint32_t threads,
                   std::uint32_t shared_bytes, void (*kernel)(Parameters), const Parameters& p, const char* what) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (Error error = as_error(status, what); error.code != Errc::ok) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = {blocks, 1, 1};
  config.blockDim = {threads, 1, 1};
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = device.major >= 9 ? 1 : 0;
  return as_error(cudaLaunchKernelEx(&config, kernel, p), what);
}

}  // namespace kvq::cuda
