// The fuzzer's bytes as a stream of numbers. When they run out every number is 0 and done() says so.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvq::testing {

class FuzzInput {
 public:
  FuzzInput(const std::uint8_t* data, std::size_t size) : at_(data), left_(size) {}
  bool done() const { return left_ == 0; }
  template <typename T>
  T take() {
    T value{};
    copy(&value, sizeof(T));
    return value;
  }
  std::uint32_t below(std::uint32_t n) {  // n <= 256 costs one byte
    return n <= 256 ? take<std::uint8_t>() % n : take<std::uint32_t>() % n;
  }
  void copy(void* out, std::size_t bytes) {
    const std::size_t have = bytes < left_ ? bytes : left_;
    std::memcpy(out, at_, have);
    at_ += have;
    left_ -= have;
  }

 private:
  const std::uint8_t* at_;
  std::size_t left_;
};

}  // namespace kvq::testing
