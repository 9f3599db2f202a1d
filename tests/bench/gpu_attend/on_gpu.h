// Arrays on the GPU for a benchmark, and an exit with the driver's words where a call fails.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvq::bench {

inline void must(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}
#define MUST(call) ::kvq::bench::must(call, #call)

// Bytes of device memory.
class OnGpu {
 public:
  explicit OnGpu(std::size_t bytes) : bytes_(bytes) { MUST(cudaMalloc(&data_, bytes)); }
  template <typename T>
  explicit OnGpu(const std::vector<T>& from) : OnGpu(from.size() * sizeof(T)) {
    MUST(cudaMemcpy(data_, from.data(), bytes_, cudaMemcpyHostToDevice));
  }
  ~OnGpu() { cudaFree(data_); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <typename T>
  std::vector<T> read() const {
    std::vector<T> out(bytes_ / sizeof(T));
    MUST(cudaMemcpy(out.data(), data_, out.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace kvq::bench
