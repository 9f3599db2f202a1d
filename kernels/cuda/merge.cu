// Joining partial attention results, on the device.
//
// Invariant: as kernels/merge.cc: the empty state is lse = -inf and its output is never read.
#include <limits>

#include "kernels/cuda/device_info.h"

namespace kvq::cuda {
namespace {

constexpr std::uint32_t kThreads = 256;

// A warp for each row.
__global__ void __launch_bounds__(kThreads) merge_kernel(float* out_a, float* lse_a, const float* out_b,
                                                         const float* lse_b, std::uint64_t rows, std::uint32_t d) {
  constexpr float kEmpty = -__builtin_huge_valf();
  const std::uint64_t row = (std::uint64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const std::uint32_t lane = threadIdx.x % 32;
  if (row >= rows) return;
  float* const a = out_a + row * d;
  const float* const b = out_b + row * d;
  const float first = lse_a[row], second = lse_b[row];
  __syncwarp();  // all lanes have read before one writes
  if (second == kEmpty) {
    if (first != kEmpty) return;
    for (std::uint32_t c = lane; c < d; c += 32) a[c] = 0;
    return;
  }
  if (first == kEmpty) {
    for (std::uint32_t c = lane; c < d; c += 32) a[c] = b[c];
    if (lane == 0) lse_a[row] = second;
    return;
  }
  const float top = first > second ? first : second;
  const float weight_a = expf(first - top), weight_b = expf(second - top), sum = weight_a + weight_b;
  for (std::uint32_t c = lane; c < d; c += 32) a[c] = (a[c] * weight_a + b[c] * weight_b) / sum;
  if (lane == 0) lse_a[row] = top + logf(sum);
}

}  // namespace

Result<void> merge_states(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint64_t rows,
                          std::uint32_t head_dim, Stream stream) {
  if (rows == 0) return {};
  if (out_a == nullptr || lse_a == nullptr || out_b == nullptr || lse_b == nullptr) {
    return Error{Errc::invalid_argument, 0, "a state is null"};
  }
  constexpr std::uint64_t kRowsOfBlock = kThreads / 32;
  const std::uint64_t blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
  if (blocks > std::numeric_limits<std::int32_t>::max()) return Error{Errc::invalid_argument, 0, "too many rows"};
  merge_kernel<<<static_cast<std::uint32_t>(blocks), kThreads, 0, stream>>>(out_a, lse_a, out_b, lse_b, rows, head_dim);
  return launch_error("merge_states");
}

}  // namespace kvq::cuda
