// One call of attention, repeated over page sets that the second-level cache cannot hold together.
//
// Invariant: pages lie in random places, quantized ones hold what the transcoder made of dense ones, and consecutive
// launches read other pages until kRotationBytes have been read. Nothing is timed before sampled rows were compared
// with the double-precision oracle over the bytes of their own pages.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_kernels.h"
#include "tests/support/device_bytes.h"

namespace kvq::bench {

struct Shape {
  std::vector<std::int32_t> lengths;  // tokens of each sequence, its queries included
  std::uint32_t queries = 1;          // of each sequence
  std::uint16_t kv_heads = 8, head_dim = 128;
  std::uint32_t group = 4;  // query heads of each KV head
  Format cold = Format::int4;
  double dense_share = 0;  // of the pages
  std::uint16_t layers = 1;
  bool growing = false;  // each sequence's last page is open, so dense, and its last token is appended

  std::string text() const;  // "8x32768", "64 of 100..100000"; queries, heads and formats where they are not the usual
};

// Memory that all workloads of a program use, one after the other: cold pages, then dense ones.
class Arena {
 public:
  explicit Arena(std::uint64_t cold_bytes = std::uint64_t{5} << 30,
                 std::uint64_t dense_bytes = std::uint64_t{11} << 30);
  std::uint64_t cold_bytes() const { return cold_bytes_; }
  std::uint64_t dense_bytes() const { return memory_.bytes() - cold_bytes_; }
  std::byte* base() const { return memory_.as<std::byte>(); }
  std::uint64_t* fault() const { return fault_.get(); }

 private:
  struct FreeHost {
    void operator()(void* at) const { cudaFreeHost(at); }
  };
  std::uint64_t cold_bytes_;
  test::DeviceBytes memory_;
  std::unique_ptr<std::uint64_t, FreeHost> fault_;  // mapped host memory
};

class Workload {
 public:
  Workload(const Arena& arena, const Shape& shape);

  void enqueue(int set, cudaStream_t stream, std::uint32_t layer = 0) const;  // throws what attend refuses
  void enqueue_append(std::uint32_t layer, cudaStream_t stream) const;        // of set 0, growing
  int sets() const { return sets_; }
  double page_bytes() const { return page_bytes_; }  // of a set, all layers, the mean of the sets
  double flops() const;                              // 4 d for each query head, query token and key that it sees

  // The largest relative distance of sampled rows (norm of the difference over the norm) from the oracle; throws when
  // it is beyond what 16-bit results explain.
  double check(std::uint32_t layer = 0) const;

 private:
  void place_pages(std::mt19937_64& random);
  void quantize(const std::vector<std::uint64_t>& places) const;
  void place_new_tokens();
  double row_error(std::uint32_t layer, std::uint32_t sequence, std::uint32_t token, std::uint32_t kv_head,
                   const std::vector<std::uint16_t>& out) const;
  AttentionCall call_of(int set, std::uint32_t layer) const;
  PageSource pages() const;

  const Arena& arena_;
  const Shape shape_;
  ModelGeometry geometry_;
  std::vector<PageLayout> layouts_{kFormatCount};
  std::uint32_t stride_ = 0;  // pages of a table's row
  int sets_ = 0;
  double page_bytes_ = 0;
  std::vector<std::uint64_t> entries_;  // as on the GPU
  std::vector<std::int32_t> tables_;    // [sets][sequences][stride]
  std::vector<std::uint16_t> query_;
  std::unique_ptr<test::DeviceBytes> entries_on_gpu_, tables_on_gpu_, lengths_, starts_, q_, out_, workspace_;
  std::unique_ptr<test::DeviceBytes> new_tokens_, slots_;  // growing only
};

}  // namespace kvq::bench
