// The tiny model with its pages on a GPU: K and V that anyone can compute, written and read by kernels on a stream.
//
// Invariant: what a kernel may have seen is read from the mirror inside the step, so that every result is compared with
// the oracle over the very bytes that it read, whatever moved meanwhile.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/device_bytes.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {

// An array in the GPU's memory.
template <typename T>
class OnGpu {
 public:
  explicit OnGpu(std::size_t count) : count_(count) { MUST(cudaMalloc(&data_, count * sizeof(T))); }
  explicit OnGpu(const std::vector<T>& values) : OnGpu(values.size()) { set(values); }
  ~OnGpu() { cudaFree(data_); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  // In the order of the stream; `values` may go at once.
  void set(const std::vector<T>& values, cudaStream_t stream = nullptr) {
    if (values.size() > count_) throw std::runtime_error("too many values for an array of the GPU");
    MUST(cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
    MUST(cudaStreamSynchronize(stream));
  }
  std::vector<T> get() const {  // waits for the whole device
    std::vector<T> out(count_);
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

// A stream that does not wait for the default one.
class Stream {
 public:
  Stream() { MUST(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { MUST(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// The arrays of one attention call of one sequence, with one query token in its last place; launched as often as one
// likes.
class Attention {
 public:
  // Room for `pages` pages. The query is made of `seed`.
  Attention(std::size_t pages, std::uint32_t layer, std::uint64_t seed);
  void set(const std::vector<std::int32_t>& table, std::int32_t length, cudaStream_t stream = nullptr);
  kvq_attend_args& args() { return args_; }
  std::uint32_t layer() const { return args_.layer; }
  const std::vector<std::uint16_t>& query() const { return query_; }
  std::vector<float> out() const { return out_.get(); }
  std::vector<float> lse() const { return lse_.get(); }

 private:
  std::vector<std::uint16_t> query_;
  OnGpu<std::uint16_t> q_;
  OnGpu<float> out_, lse_;
  OnGpu<std::int32_t> table_, length_, starts_;
  kvq_attend_args args_{};
};

class GpuModel {
 public:
  explicit GpuModel(const std::string& socket, const ModelOptions& options = {}) : tiny_(socket, options) {}
  Model& model() { return tiny_.model(); }
  kvq_model* get() { return tiny_.get(); }
  TinyModel& tiny() { return tiny_; }

  // Appends K and V of tokens [first, first + tokens.size()) on the stream, inside a step of the caller's.
  void append(Sequence& sequence, std::uint64_t first, const std::vector<std::uint32_t>& tokens, cudaStream_t stream);
  // The same in a step that ends on the stream, after a reservation; commits. Returns the step. Waits for the copies to
  // the GPU, not for the kernels.
  std::uint64_t write(Sequence& sequence, std::uint64_t first, const std::vector<std::uint32_t>& tokens,
                      cudaStream_t stream = nullptr);

  // Attends `calls` times on the stream, in one step, and compares each result with the oracle; throws when one
  // differs.
  kvq::test::Seen attend_and_check(const std::vector<std::int32_t>& table, std::int32_t length, std::uint32_t layer,
                                   std::uint64_t seed, std::uint32_t calls = 1, cudaStream_t stream = nullptr);
  // Compares what a call gave with the oracle for entries as they are now; inside a step of the caller's.
  void check(const Attention& attention, const std::vector<std::int32_t>& table, std::int32_t length);

  // The mirror's words of these pages, and a page's bytes.
  std::vector<std::uint64_t> entry_words(const std::vector<std::int32_t>& table);
  std::vector<std::byte> page_bytes(std::uint64_t entry_word);
  kvq_fault fault();

 private:
  TinyModel tiny_;
};

// In a role: throws with the library's last error.
void expect(bool truth, const char* what);
void expect_lost(kvq_status status, const char* what);  // CONTEXT_LOST, with what to do

// Of a kvqd on the first GPU, with room for 1,024 dense pages of 32 KiB. `exporter`: vmm or legacy.
std::string gpu_settings(double quantize_at, const std::string& exporter);

// Waits until `done`; throws after 20 s.
template <typename Done>
void await(const char* what, Done done) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) throw std::runtime_error(std::string("still waiting: ") + what);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // what is awaited has no event
  }
}

}  // namespace kvq::test
