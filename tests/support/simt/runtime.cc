// The little of the CUDA runtime that kernel tests call, over host memory, and a device for the kernels' fronts: few
// multiprocessors, so that small problems are cut as large ones are on a GPU.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/cuda/device_info.h"
#include "tests/support/simt/simt.h"

struct CUgraph_st {
  std::vector<std::function<void()>> launches;
};

namespace kvq::simt {
namespace {
CUgraph_st* capturing;
}

void launch(std::function<void()> work) {
  if (capturing != nullptr) {
    capturing->launches.push_back(std::move(work));
  } else {
    work();
  }
}

}  // namespace kvq::simt

namespace kvq::cuda {

Error as_error(cudaError_t status, const char* what) {
  return status == cudaSuccess ? Error{} : Error{Errc::system, static_cast<int>(status), what};
}

Result<DeviceInfo> current_device() {
  DeviceInfo info{};
  const char* const count = std::getenv("KVQ_SIMT_MULTIPROCESSORS");
  info.multiprocessors = count != nullptr ? static_cast<std::uint32_t>(std::atoi(count)) : 5;
  info.shared_bytes = 227 << 10;
  info.major = 9;
  return info;
}

Result<void> check_device() { return {}; }

}  // namespace kvq::cuda

extern "C" {
cudaError_t cudaMalloc(void** at, size_t bytes) {
  *at = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *at != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* at) {
  std::free(at);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) { return cudaMalloc(at, bytes); }
cudaError_t cudaFreeHost(void* at) { return cudaFree(at); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  std::memset(at, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  kvq::simt::capturing = new CUgraph_st;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = std::exchange(kvq::simt::capturing, nullptr);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* replay, cudaGraph_t graph, unsigned long long) {
  *replay = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t) {
  for (const auto& launch : reinterpret_cast<cudaGraph_t>(replay)->launches) launch();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the host's"; }
}
