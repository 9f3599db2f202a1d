// Writes new tokens into open pages, all tokens of a layer in one launch.
//
// Invariant: only the named tokens' rows of open dense pages are written. A token whose slot is wrong is left out and
// reported; the null page and sealed pages swallow theirs, as on the host.
#include <limits>

#include "kernels/cuda/device_info.h"
#include "kernels/cuda/page_lookup.cuh"
#include "kernels/cuda/page_table.h"

namespace kvq::cuda {
namespace {

constexpr std::uint32_t kManyTokens = 512;  // until there all threads that a token can use are welcome
constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

struct AppendParams {
  PageTable pages;
  const std::uint16_t* k;
  const std::uint16_t* v;
  std::int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  const std::int64_t* slots;
  std::uint32_t kv_heads, d;
  bool vectors;  // every source row begins at a multiple of 16 bytes
};

// Where the token's rows of head 0 go, 0 if nowhere. All threads look; one reports.
__device__ std::uint64_t find_target(const AppendParams& p, std::uint32_t token, std::int64_t slot) {
  if (slot == kNoSlot) return 0;
  PageWord found;
  if (slot < 0) {
    found.code = Errc::invalid_argument;
  } else {
    found = find_page(p.pages, slot / kPageTokens);
  }
  const Entry entry = unpack_entry(found.word);
  const LayerFormat& dense = p.pages.formats[static_cast<std::uint32_t>(Format::dense)];
  if (found.code == Errc::ok) {
    if (entry.state != EntryState::open) return 0;
    if (entry.format != Format::dense || dense.format == Format::none) found.code = Errc::wrong_layout;
  }
  if (found.code != Errc::ok) {
    if (threadIdx.x == 0) report_fault(p.pages, found.code, token, found.page);
    return 0;
  }
  return p.pages.arena + entry.offset_bytes + dense.offset_bytes;
}

__device__ uint4 read_chunk(const std::uint16_t* from, bool vectors) {
  if (vectors) return __ldg(reinterpret_cast<const uint4*>(from));
  std::uint32_t word[4];
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) word[i] = from[2 * i] | std::uint32_t{from[2 * i + 1]} << 16;
  return {word[0], word[1], word[2], word[3]};
}

// A block for each token; a thread has kAtOnce chunks of 16 bytes on their way, the first of them while the page is
// looked up.
template <std::uint32_t kThreads, std::uint32_t kAtOnce>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams p) {
  const std::uint32_t token = blockIdx.x, chunks = p.d / 8, count = 2 * p.kv_heads * chunks;
  const std::uint32_t head_bytes = kPageTokens * p.d * 4;
  const std::int64_t slot = __ldg(p.slots + token);
  const auto position = static_cast<std::uint32_t>(slot % kPageTokens);
  const std::uint16_t* const k = p.k == nullptr ? nullptr : p.k + token * p.k_token_stride;
  const std::uint16_t* const v = p.v == nullptr ? nullptr : p.v + token * p.v_token_stride;
  std::uint64_t target = 0;
  for (std::uint32_t first = threadIdx.x; first < count; first += kAtOnce * kThreads) {
    uint4 w[kAtOnce];
    std::uint64_t to[kAtOnce];  // past the target; kNowhere: not to be written
#pragma unroll
    for (std::uint32_t n = 0; n < kAtOnce; ++n) {
      const std::uint32_t i = first + n * kThreads, row = i / chunks, c = i - row * chunks;
      const bool keys = row < p.kv_heads;
      const std::uint32_t head = keys ? row : row - p.kv_heads;
      const std::uint16_t* const from = keys ? k : v;
      to[n] = kNowhere;
      if (i >= count || from == nullptr) continue;
      w[n] = read_chunk(from + head * (keys ? p.k_head_stride : p.v_head_stride) + 8 * c, p.vectors);
      to[n] = std::uint64_t{head} * head_bytes + (keys ? 0 : head_bytes / 2) +
              (position * chunks + dense_chunk(position, c, p.d)) * 16;
    }
    if (first < kThreads) target = find_target(p, token, slot);
    if (target == 0) return;
#pragma unroll
    for (std::uint32_t n = 0; n < kAtOnce; ++n) {
      if (to[n] != kNowhere) *reinterpret_cast<uint4*>(target + to[n]) = w[n];
    }
  }
}

bool aligned(const void* base, std::int64_t token_stride, std::int64_t head_stride) {
  return base == nullptr ||
         (reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && token_stride % 8 == 0 && head_stride % 8 == 0);
}

}  // namespace

Result<void> append(const AppendCall& call, const Launch& launch) {
  if (Error error = check_model(call.model, call.layer); error.code != Errc::ok) return error;
  const LayerSpec& spec = call.model.geometry->layer[call.layer];
  if (call.dtype != spec.dtype) return Error{Errc::wrong_layout, 0, "dtype is not the layer's"};
  if (call.tokens == 0) return {};
  if (call.slots == nullptr) return Error{Errc::invalid_argument, 0, "slots is null"};
  if (call.tokens > static_cast<std::uint32_t>(std::numeric_limits<std::int32_t>::max())) {
    return Error{Errc::invalid_argument, 0, "more than 2^31 - 1 tokens"};
  }
  AppendParams p{};
  if (Error error = make_page_table(call.model, call.pages, call.layer, launch, p.pages); error.code != Errc::ok) {
    return error;
  }
  p.k = static_cast<const std::uint16_t*>(call.k);
  p.v = static_cast<const std::uint16_t*>(call.v);
  p.k_token_stride = call.k_token_stride, p.k_head_stride = call.k_head_stride;
  p.v_token_stride = call.v_token_stride, p.v_head_stride = call.v_head_stride;
  p.slots = call.slots;
  p.kv_heads = spec.kv_heads;
  p.d = spec.head_dim;
  p.vectors = aligned(call.k, call.k_token_stride, call.k_head_stride) &&
              aligned(call.v, call.v_token_stride, call.v_head_stride);
  if (call.tokens < kManyTokens) {
    append_kernel<256, 1><<<call.tokens, 256, 0, launch.stream>>>(p);
  } else {
    append_kernel<64, 4><<<call.tokens, 64, 0, launch.stream>>>(p);
  }
  return launch_error("append");
}

}  // namespace kvq::cuda
