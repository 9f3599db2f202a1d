// Asking the runtime for the driver. The runtime is linked statically and looks for libcuda itself, so this starts
// everywhere.
#include "kernels/cuda/driver.h"

#include <cuda_runtime_api.h>

#include <cstdio>

namespace kvq::cuda {
namespace {

constexpr unsigned kSignatures = 12000;  // the CUDA version whose signatures the table has

// What driver() answers, for good. The text of an error lives here.
struct Answer {
  Driver table;
  Error error;
  char text[256] = "";
};

template <typename... Values>
bool fail(Answer& answer, int native, const char* format, Values... values) {
  std::snprintf(answer.text, sizeof answer.text, format, values...);
  answer.error = {Errc::system, native, answer.text};
  return false;
}

bool find(Answer& answer, const char* name, void** entry) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t code = cudaGetDriverEntryPointByVersion(name, entry, kSignatures, cudaEnableDefault, &found);
  if (code == cudaSuccess && found == cudaDriverEntryPointSuccess && *entry != nullptr) return true;
  return fail(answer, code, "the NVIDIA driver (CUDA %d.%d) has no %s; install a newer driver",
              answer.table.version / 1000, answer.table.version % 1000 / 10, name);
}

bool fill(Answer& answer) {
  int& version = answer.table.version;
  cudaDriverGetVersion(&version);
  if (version == 0) {
    return fail(
        answer, cudaErrorInsufficientDriver,
        "no NVIDIA driver: libcuda.so.1 was not found; install the driver, or start the container with the GPU");
  }
  if (version / 1000 < CUDART_VERSION / 1000) {
    return fail(answer, cudaErrorInsufficientDriver,
                "the NVIDIA driver knows CUDA up to %d.%d, this build of kvq needs CUDA %d.0; install a newer driver",
                version / 1000, version % 1000 / 10, CUDART_VERSION / 1000);
  }
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code == cudaErrorNoDevice || (code == cudaSuccess && devices == 0)) {
    return fail(
        answer, code,
        "the NVIDIA driver is here (CUDA %d.%d), but no GPU is visible; see CUDA_VISIBLE_DEVICES and the container",
        version / 1000, version % 1000 / 10);
  }
  if (code != cudaSuccess) return fail(answer, code, "CUDA does not start: %s", cudaGetErrorString(code));
#define KVQ_CUDA_FIND(member, entry) \
  if (!find(answer, #entry, reinterpret_cast<void**>(&answer.table.member))) return false;
  KVQ_CUDA_DRIVER(KVQ_CUDA_FIND)
#undef KVQ_CUDA_FIND
  return true;
}

}  // namespace

Result<const Driver*> driver() {
  static const Answer* answer = [] {
    auto* made = new Answer;  // never freed: errors point into it
    fill(*made);
    return made;
  }();
  if (answer->error.code != Errc::ok) return answer->error;
  return &answer->table;
}

bool is_context_lost(int native) {
  switch (native) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_MPS_CONNECTION_FAILED:
    case CUDA_ERROR_MPS_RPC_FAILURE:
    case CUDA_ERROR_MPS_SERVER_NOT_READY:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      return false;
  }
}

Error driver_error(int native, const char* what) {
  if (native == CUDA_ERROR_OUT_OF_MEMORY) return {Errc::no_memory, native, what};
  return {is_context_lost(native) ? Errc::context_lost : Errc::system, native, what};
}

const char* driver_text(int native) { return cudaGetErrorString(static_cast<cudaError_t>(native)); }

}  // namespace kvq::cuda
