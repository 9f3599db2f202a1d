// Views: what a thread of the model knows of memory, and the hash of what the model has seen.
//
// Invariant: a view only grows. The first bytes say, for each word, which of its messages is the oldest that may still
// be read; the last ones, for each thread, how much of what it did happened before.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

namespace kvq::model {

inline constexpr std::size_t kMaxWords = 32, kMaxThreads = 8;  // thread 0 sets memory up

struct View {
  std::array<std::uint8_t, kMaxWords> message{};
  std::array<std::uint8_t, kMaxThreads> clock{};

  void join(const View& other) {
    join_messages(other);
    for (std::size_t i = 0; i < kMaxThreads; ++i) clock[i] = std::max(clock[i], other.clock[i]);
  }
  // A fence in seq_cst order tells what may be read, but makes nothing happen before anything: so says the language.
  void join_messages(const View& other) {
    for (std::size_t i = 0; i < kMaxWords; ++i) message[i] = std::max(message[i], other.message[i]);
  }
};

class Hash {
 public:
  void add(std::uint64_t word) {
    value_ = (value_ ^ word) * 0x9e37'79b9'7f4a'7c15;
    value_ = (value_ ^ (value_ >> 32)) * 0xd6e8'feb8'6659'fd93;
    value_ ^= value_ >> 32;
  }
  void add(const View& view) {
    std::array<std::uint64_t, sizeof(View) / 8> words;
    static_assert(sizeof words == sizeof view);
    std::memcpy(&words, &view, sizeof words);
    for (std::uint64_t word : words) add(word);
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0x2545'f491'4f6c'dd1d;
};

}  // namespace kvq::model
