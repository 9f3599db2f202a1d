// How much of a GPU is in use, asked without a context: CUDA tells it only from inside one, whose cost is what is
// sought.
//
// Invariant: found at run time like the driver, of which it is a part; where a container leaves it out, the answer is
// "not known".
#pragma once

#include <cstdint>
#include <string>

namespace kvq::gpu {

class Nvml {
 public:
  Nvml();
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // By anyone, in bytes; 0: not known.
  std::uint64_t used_bytes(const std::string& uuid) const;

 private:
  struct Memory {  // nvmlMemory_t
    unsigned long long total, free, used;
  };

  void* library_;
  bool ready_ = false;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*by_uuid_)(const char*, void**) = nullptr;
  int (*memory_)(void*, Memory*) = nullptr;
};

}  // namespace kvq::gpu
