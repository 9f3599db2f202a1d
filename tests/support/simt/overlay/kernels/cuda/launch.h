// What kernels/cuda/launch.h has, on the host: the launch is over when it returns, or goes into the graph that is
// being captured.
#pragma once

#include "kernels/cuda/device_info.h"
#include "tests/support/simt/simt.h"

namespace kvq::cuda {

template <typename Parameters>
Error launch_early(const DeviceInfo&, cudaStream_t, std::uint32_t blocks, std::uint32_t threads,
                   std::uint32_t shared_bytes, void (*kernel)(Parameters), const Parameters& p, const char*) {
  simt::launch([=] { simt::run(blocks, threads, shared_bytes, [&] { kernel(p); }); });
  return {};
}

}  // namespace kvq::cuda
