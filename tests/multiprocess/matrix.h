// What the kill matrix and its worker process share.
#pragma once

#include <cstdint>
#include <vector>

namespace kvq::test {

inline constexpr std::uint32_t kMatrixStreams = 16, kMatrixRounds = 20;
// Streams that the worker writes under their keys.
std::vector<std::uint32_t> matrix_tokens(std::uint32_t stream);

}  // namespace kvq::test
