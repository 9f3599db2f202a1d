// Opening the GPU. The limits below are what a context takes for what kvq's kernels never do.
#include "daemon/gpu/cuda_context.h"

#include <algorithm>

namespace kvq::gpu {
namespace {

Result<cuda::Gpu> choose(const std::string& uuid, std::string& why_not) {
  Result<std::vector<cuda::Gpu>> gpus = cuda::visible_gpus();
  if (!gpus) {
    why_not = gpus.error().context;
    return gpus.error();
  }
  why_not = "no GPU with UUID " + uuid + " is visible; there is";
  for (cuda::Gpu& gpu : *gpus) {
    if (uuid.empty() || gpu.uuid == uuid) {
      why_not.clear();
      return std::move(gpu);
    }
    why_not += " " + gpu.uuid;
  }
  return Error{Errc::system, CUDA_ERROR_INVALID_DEVICE, "no visible GPU has this UUID"};
}

}  // namespace

Result<std::unique_ptr<CudaContext>> CudaContext::open(const std::string& uuid, std::string& why_not) {
  Result<cuda::Gpu> gpu = choose(uuid, why_not);
  if (!gpu) return gpu.error();
  std::unique_ptr<CudaContext> out(new CudaContext(**cuda::driver(), *gpu));
  if (const Result<void> entered = out->enter(); !entered) {
    const Error& e = entered.error();
    why_not = gpu->uuid + " (" + gpu->name + "): " + e.context + ": " + cuda::driver_text(e.native);
    return e;
  }
  return out;
}

Result<void> CudaContext::enter() {
  const auto& d = driver_;
  used_before_ = nvml_.used_bytes(gpu_.uuid);
  // Refused when the context is there already, which in this program it is not.
  CUresult code = d.primary_ctx_set_flags(gpu_.device, CU_CTX_SCHED_BLOCKING_SYNC);
  if (code) return cuda::driver_error(code, "cuDevicePrimaryCtxSetFlags");
  CUcontext context = nullptr;
  if ((code = d.primary_ctx_retain(&context, gpu_.device))) return cuda::driver_error(code, "cuDevicePrimaryCtxRetain");
  retained_ = true;
  if ((code = d.ctx_set_current(context))) return cuda::driver_error(code, "cuCtxSetCurrent");
  // kvq's kernels neither print nor allocate nor recurse; a limit that a driver does not take is no error.
  d.ctx_set_limit(CU_LIMIT_PRINTF_FIFO_SIZE, 0);
  d.ctx_set_limit(CU_LIMIT_MALLOC_HEAP_SIZE, 0);
  d.ctx_set_limit(CU_LIMIT_STACK_SIZE, 0);
  int in_mps = 0, clock_khz = 0, width_bits = 0;
  d.device_get_attribute(&in_mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, gpu_.device);
  d.device_get_attribute(&clock_khz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, gpu_.device);
  d.device_get_attribute(&width_bits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, gpu_.device);
  in_mps_ = in_mps != 0;
  gpu_bytes_per_s_ = std::uint64_t{1000} * static_cast<std::uint32_t>(std::max(clock_khz, 0)) *
                     static_cast<std::uint32_t>(std::max(width_bits, 0)) / 8 * 2;  // twice a clock
  return {};
}

CudaContext::~CudaContext() {
  if (retained_) driver_.primary_ctx_release(gpu_.device);
}

Result<std::uint64_t> CudaContext::free_bytes() const {
  std::size_t free = 0, total = 0;
  if (const CUresult code = driver_.mem_get_info(&free, &total)) return cuda::driver_error(code, "cuMemGetInfo");
  return std::uint64_t{free};
}

std::uint64_t CudaContext::overhead_bytes() const {
  const std::uint64_t used = nvml_.used_bytes(gpu_.uuid);
  return used_before_ != 0 && used > used_before_ ? used - used_before_ : 0;
}

}  // namespace kvq::gpu
