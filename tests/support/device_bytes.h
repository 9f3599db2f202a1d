// Memory of the GPU that a test or benchmark takes for itself. Invariant: what the runtime refuses is thrown, in its
// words.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvq::test {

inline void must(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}
#define MUST(call) ::kvq::test::must(call, #call)

// Bytes of device memory.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) { MUST(cudaMalloc(&data_, bytes)); }
  template <typename T>
  explicit DeviceBytes(const std::vector<T>& from) : DeviceBytes(from.size() * sizeof(T)) {
    MUST(cudaMemcpy(data_, from.data(), bytes_, cudaMemcpyHostToDevice));
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

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

}  // namespace kvq::test
