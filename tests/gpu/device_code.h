// The few kernels that tests of the CUDA device need. Each call gives the runtime's code and, but for one, waits for
// its kernel.
#pragma once

#include <cstdint>

namespace kvq::test {

// Word i of the memory becomes `first` + i.
int fill(std::uint64_t base, std::uint64_t bytes, std::uint32_t first);
// Random bf16 values of moderate size, which are finite fp16 values too.
int fill_values(std::uint64_t base, std::uint64_t bytes);
// How many words are not what fill() wrote, or not 0.
int count_wrong(std::uint64_t base, std::uint64_t bytes, std::uint32_t first, std::uint64_t& wrong);
int count_nonzero(std::uint64_t base, std::uint64_t bytes, std::uint64_t& nonzero);
int write_word(std::uint64_t address, std::uint32_t value);
// Starts a kernel that runs for about this long, and does not wait for it; finish() does.
int start_spinning(std::uint32_t ms);
int finish();

// What a kernel sees that loads one 64-bit word again and again until it is `last`, or for about five seconds.
struct Seen {
  std::uint64_t last = 0, changes = 0, steps_back = 0;
};
// `started` is mapped host memory: 1 once the kernel runs.
int watch(std::uint64_t address, std::uint64_t last, volatile std::uint64_t* started, Seen& seen);

}  // namespace kvq::test
