// A model small enough for tests, and K and V that anyone can compute: each element is a function of where it belongs.
//
// Invariant: dense pages hold exactly element(...); so every process knows what any page of any token stream must
// contain.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/oracle.h"
#include "kvq/kvq.hpp"

namespace kvq::test {

inline constexpr std::uint32_t kLayers = 2, kKvHeads = 1, kQueryHeads = 2, kHeadDim = 64;

std::uint64_t test_seed();  // printed; KVQ_TEST_SEED gives it back

struct ModelOptions {
  std::uint8_t fingerprint = 1;
  kvq_role role = KVQ_ROLE_BOTH;
  std::uint32_t credits = 4;
  bool floor_dense = false;
  const char* device = nullptr;
  const char* label = "test";
};

// fp16 bits of K (v = false) or V of one token. Values lie within (-2, 2) and differ by channel, position and token id.
std::uint16_t element(std::uint32_t layer, bool v, std::uint64_t position, std::uint32_t token, std::uint32_t channel);

// `count` token ids that no other `stream` has.
std::vector<std::uint32_t> token_stream(std::uint32_t stream, std::size_t count);

// What a burst of attention calls saw.
struct Seen {
  std::uint64_t calls = 0;
  std::uint64_t exact = 0;      // no page changed its entry during the call: one mix was possible
  std::uint64_t dense = 0;      // calls after which all pages were dense,
  std::uint64_t quantized = 0;  // all but at most one page (the sink) quantized,
  std::uint64_t mixed = 0;      // anything between
};

// A client with one registered tiny model.
class TinyModel {
 public:
  TinyModel(const std::string& socket, const ModelOptions& options);

  Model& model() { return model_; }
  Client& client() { return client_; }
  kvq_model* get() { return model_.get(); }

  // Appends K and V of tokens [first, first + tokens.size()) in a step and commits them. Reserves within deadline_ms.
  void write(Sequence& sequence, std::uint64_t first, const std::vector<std::uint32_t>& tokens,
             std::uint32_t deadline_ms = 5000, bool commit = true);
  // The same without reserve, commit and step.
  void append(Sequence& sequence, std::uint64_t first, const std::vector<std::uint32_t>& tokens);

  // Attends `calls` times without pause, in one step, from the last token over `length` tokens, then compares each
  // result with the oracle for every mix of formats that the pages may have had during its call. Throws
  // std::runtime_error when one is none of them.
  Seen attend_and_check(const std::vector<std::int32_t>& block_table, std::int32_t length, std::uint32_t layer,
                        std::uint64_t seed, std::uint32_t calls = 1);

  // Asks the daemon for a round trip again and again until `done` says so; throws after a minute.
  template <typename Done>
  void await(const char* what, Done done) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!done()) {
      if (std::chrono::steady_clock::now() > until) throw std::runtime_error(std::string("still waiting: ") + what);
      check(kvq_credits_request(get(), 1, 10'000));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the daemon's tick, which no call here can await
    }
  }
  void await_cached(const std::vector<std::uint32_t>& tokens, std::uint64_t cached) {
    await("for pages to be cached", [&] { return model_.lookup(tokens).cached_tokens >= cached; });
  }
  void await_quantized(const std::vector<std::uint32_t>& tokens, std::uint64_t quantized) {
    await("for pages to be quantized", [&] { return model_.lookup(tokens).quantized_tokens >= quantized; });
  }

  // Compares the bytes of a dense page with element(); throws when they differ. False when the page is not dense.
  bool check_dense_bytes(std::int32_t page, std::uint64_t first, const std::uint32_t* tokens);

 private:
  Client client_;
  Model model_;
};

}  // namespace kvq::test
