// What kernels/cuda/launch.h has, on the host: the launch is over when it returns, or goes into the graph that is
// being captured.
#pragma once

#include "kernels/cuda/device_info.h"
#include "tests/support/simt/simt.h"

namespace kvq::cuda {

template <typename... Parameters, typename... Arguments>
Error launch_early(const DeviceInfo&, cudaStream_t, dim3 grid, std::uint32_t threads, std::uint32_t shared_bytes,
                   const char*, void (*kernel)(Parameters...), const Arguments&... arguments) {
  simt::launch([=] { simt::run({grid.x, grid.y, 1}, threads, shared_bytes, [&] { kernel(arguments...); }); });
  return {};
}

}  // namespace kvq::cuda
