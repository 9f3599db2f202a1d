// What a result file says of the GPU that it was measured on. Invariant: asked of the runtime, never of an option.
#pragma once

#include <string>

#include "tests/bench/arguments.h"
#include "tests/bench/rows.h"
#include "tests/support/device_bytes.h"

namespace kvq::bench {

inline About about_gpu(const std::string& topic, const std::string& program, const Arguments& arguments) {
  cudaDeviceProp device{};
  int driver = 0;
  MUST(cudaGetDeviceProperties(&device, 0));
  MUST(cudaDriverGetVersion(&driver));
  return {topic,
          device.name,
          driver_name(driver),
          arguments.text("date"),
          arguments.text("commit"),
          arguments.command(program)};
}

}  // namespace kvq::bench
