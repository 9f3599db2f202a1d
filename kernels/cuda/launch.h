// Launches that may begin before the work in front of them has ended; the kernels wait for it themselves.
#pragma once

#include "kernels/cuda/device_info.h"

namespace kvq::cuda {

// `what` names the launch in an error.
template <typename... Parameters, typename... Arguments>
Error launch_early(const DeviceInfo& device, cudaStream_t stream, dim3 grid, std::uint32_t threads,
                   std::uint32_t shared_bytes, const char* what, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (Error error = as_error(status, what); error.code != Errc::ok) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = {threads, 1, 1};
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = device.major >= 9 ? 1 : 0;
  return as_error(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), what);
}

}  // namespace kvq::cuda
