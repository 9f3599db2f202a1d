// A server of Llama-3-8B's shape without its weights: 32 layers, 32 query heads over 8 KV heads, d 128, fp16.
//
// Invariant: everything runs on one stream of its own; K and V are those of values.h, so any process can say what any
// page holds. Throws kvq::Failure, or std::runtime_error for CUDA's own errors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvq/kvq.hpp"
#include "tests/bench/gpu_node/values.h"
#include "tests/support/device_bytes.h"

namespace kvq::bench {

inline constexpr std::uint32_t kLayers = 32, kKvHeads = 8, kQueryHeads = 32, kHeadDim = 128;
inline constexpr std::uint32_t kChunkTokens = 4096;  // appended in one step
inline constexpr double kDensePageBytes = 64.0 * 2 * 2 * kLayers * kKvHeads * kHeadDim;

using test::DeviceBytes;
using test::must;

class Llama {
 public:
  Llama(const std::string& socket, std::uint32_t seed, std::uint32_t credits = 256);
  ~Llama();

  kvq_model* model() const { return model_.get(); }
  CUstream_st* stream() const { return stream_; }

  // Token ids of this seed's stream. Editions of it have other ids, so no page in common, but the same K and V, so one
  // right result.
  std::vector<std::uint32_t> tokens(std::uint64_t first, std::uint64_t count, std::uint32_t edition = 0) const;
  // How many of the edition's first tokens can be had without computing them.
  std::uint64_t cached(std::uint64_t tokens, std::uint32_t edition) const;
  Sequence open(std::uint64_t prefix_tokens, std::uint32_t edition = 0);
  Sequence open_dense();    // its pages are not quantized for as long as it holds them
  Sequence open_private();  // its pages go with it
  // Appends, in all layers, and commits the sequence's tokens [first, first + count): those of the stream from `text` +
  // first on.
  void grow(Sequence& sequence, std::uint64_t first, std::uint64_t count, std::uint64_t text = 0,
            std::uint32_t deadline_ms = 60'000, std::uint32_t edition = 0);

  // Sets the batch of the following decode steps: one query token each, over `lengths` tokens.
  void set_batch(const std::vector<const Sequence*>& sequences, const std::vector<std::int32_t>& lengths);
  // One decode step's attention over all layers, as one kvq step; returns after launching.
  void decode();
  void launch_layers();  // what decode() launches, for graphs: the caller holds a step
  void synchronize();
  float* out(std::uint32_t layer) const;  // fp32 [batch][kQueryHeads][kHeadDim], device memory
  const std::vector<std::uint16_t>& queries() const { return host_q_; }  // fp16 [batch][kQueryHeads][kHeadDim]

  // Microseconds per decode step between two events, `repeat` of them.
  std::vector<double> time_decode(int repeat);

 private:
  struct Memory {
    Memory();
    DeviceBytes k, v, slots, q, out, tables, lengths, starts;
  };
  void attend(std::uint32_t layer);
  void upload_batch();

  std::uint32_t seed_;
  Client client_;
  Model model_;
  CUstream_st* stream_ = nullptr;
  std::unique_ptr<Memory> memory_;
  std::vector<std::uint16_t> host_q_;
  std::vector<std::int32_t> host_tables_, host_lengths_, host_starts_;
  std::uint32_t batch_ = 0;
  std::int64_t table_stride_ = 0;
};

}  // namespace kvq::bench
