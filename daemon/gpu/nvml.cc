// Four functions of libnvidia-ml, whose names and shapes NVIDIA keeps.
#include "daemon/gpu/nvml.h"

#include <dlfcn.h>

namespace kvq::gpu {
namespace {

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

Nvml::Nvml() : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
  ready_ = library_ != nullptr && find(library_, "nvmlInit_v2", init_) && find(library_, "nvmlShutdown", shutdown_) &&
           find(library_, "nvmlDeviceGetHandleByUUID", by_uuid_) &&
           find(library_, "nvmlDeviceGetMemoryInfo", memory_) && init_() == 0;
}

Nvml::~Nvml() {
  if (ready_) shutdown_();
  if (library_ != nullptr) ::dlclose(library_);
}

std::uint64_t Nvml::used_bytes(const std::string& uuid) const {
  void* device = nullptr;
  Memory memory{};
  if (!ready_ || by_uuid_(uuid.c_str(), &device) != 0 || memory_(device, &memory) != 0) return 0;
  return memory.used;
}

}  // namespace kvq::gpu
