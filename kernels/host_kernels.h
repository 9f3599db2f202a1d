// The host kernels: append, attend, merge and transcode on pages that lie in mapped memory.
//
// Invariant: pointers in, nothing kept. No call stores a pointer past its return, allocates per token, or touches a
// page outside the blocks that its arguments name. Every unsupported or wrong argument is an Error that names it;
// nothing is computed differently in silence. All functions may be called from any number of threads at once.
//
// The caller holds an open step around append and attend (docs/epochs.md), so each directory entry is loaded once per
// page and stays valid until the call returns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvq/directory.h"
#include "kvq/page_format.h"
#include "kvq/result.h"
#include "kvq/types.h"

namespace kvq {

// Where pages are: a tenant's directory and the base of the arena's address range. Slabs that the process mapped
// read-only stay so: only `append` writes, and only into pages in state `open`.
struct PageSource {
  const DirectoryEntry* entries = nullptr;
  std::uint32_t capacity = 0;  // entries, the null page included
  std::byte* arena = nullptr;
};

// The layouts of one model by format: `layouts[raw(format)]` is make_layout(geometry, format). Formats that the model
// does not use may be left with Format::none; meeting one is Errc::wrong_layout.
struct ModelView {
  const ModelGeometry* geometry = nullptr;
  const PageLayout* layouts = nullptr;  // kFormatCount of them
};

// --- append --------------------------------------------------------------------------------------------------------

inline constexpr std::int64_t kNoSlot = -1;

// K and V of `tokens` new tokens of one layer, in the layer's dtype. Element (token, head, channel) is at
// token * token_stride + head * head_stride + channel, in elements; strides may be negative or zero.
struct AppendCall {
  ModelView model;
  PageSource pages;
  std::uint32_t layer = 0;
  Dtype dtype = Dtype::fp16;
  const void* k = nullptr;  // null: K is not written
  const void* v = nullptr;  // null: V is not written
  std::int64_t k_token_stride = 0, k_head_stride = 0;
  std::int64_t v_token_stride = 0, v_head_stride = 0;
  const std::int64_t* slots =
      nullptr;  // per token: page id * 64 + position; kNoSlot and the null page swallow the token
  std::uint32_t tokens = 0;
};

// Writes into open pages; a token whose page is sealed (already holds that token) is left alone. All slots are checked
// before the first byte is written. Errors: stale_id (page id outside the directory, or free), lost_page (lost, or in
// host memory), invalid_argument, wrong_layout.
Result<void> append(const AppendCall& call);

// --- attend --------------------------------------------------------------------------------------------------------

enum class Real : std::uint8_t { fp16 = 0, bf16 = 1, fp32 = 2 };  // element type of queries and outputs

inline constexpr std::uint32_t kMaxGroup = 16;  // query heads per KV head

// One layer's attention for a batch of sequences with any number of query tokens each. The query tokens are the last
// ones of their sequence: token i of n is at position length - n + i (a row at a negative position sees nothing).
// Key j is seen by position p if  j < length,  j <= p when causal,  and  j > p - window when window >= 0.
// score = softcap(scale * q.k) + ALiBi, softcap(s) = cap * tanh(s / cap), ALiBi = -slope * |p - j|.
// Key and value tokens at or past `length` are never read into a result; those below it must be finite.
struct AttentionCall {
  ModelView model;
  PageSource pages;
  std::uint32_t layer = 0;

  std::uint32_t batch = 0;
  const std::int32_t* block_tables = nullptr;  // [batch][block_table_stride] page ids; 0 is the null page (zeros)
  std::int64_t block_table_stride = 0;         // entries; only those of pages that some row can see are read
  const std::int32_t* lengths = nullptr;       // [batch] KV tokens, the query tokens included
  const std::int32_t* query_starts = nullptr;  // [batch + 1] rows of q and out, ascending from any start

  const void* q = nullptr;
  Real q_type = Real::fp16;
  std::int64_t q_token_stride = 0, q_head_stride = 0;  // elements; channels are contiguous
  std::uint32_t query_heads = 0;                       // 1..16 per KV head of the layer

  void* out = nullptr;
  Real out_type = Real::fp16;
  std::int64_t out_token_stride = 0, out_head_stride = 0;
  float* lse = nullptr;  // [query token][query_heads], natural log of the denominator (sink included); -inf when empty

  float scale = 0;  // 0: 1 / sqrt(head_dim)
  bool causal = true;
  std::int32_t window = -1;      // tokens to the left including the own one; -1: none; pages wholly outside are skipped
  float softcap = 0;             // 0: none
  const float* alibi = nullptr;  // [query_heads] slopes, or null
  const float* sinks = nullptr;  // [query_heads] learned logits that join the denominator, or null
  int threads = 1;               // 1..kMaxThreads workers, this thread included
};

inline constexpr int kMaxThreads = 256;

// Rows without a visible key give zeros and lse = -inf (or the sink's logit). NaN in a visible key, value or query
// gives NaN in its rows. Numeric bound: see kernels/attend_simd.cc. The result does not depend on `threads` beyond fp32
// rounding of the split. Errors: stale_id, lost_page, wrong_layout, invalid_argument; `out` is then undefined.
Result<void> attend(const AttentionCall& call);

// Joins two partial results over disjoint keys into the first: out_a, lse_a become those of the union. fp32,
// [rows][head_dim] dense. An empty state (lse = -inf) contributes nothing, whatever its `out` holds (even NaN); two
// empty states give zeros and -inf. A learned sink belongs into one of the parts only.
void merge_states(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint32_t rows,
                  std::uint32_t head_dim);

// --- transcode -----------------------------------------------------------------------------------------------------

// Rewrites one page. dense -> any quantized format, any quantized format -> dense, and same -> same (a copy); a pair of
// different quantized formats is refused. On an error (non-finite or beyond fp16 input) the content of `dst` is
// undefined and the page has to stay as it is. `dst` must not overlap `src`; bytes of padding are zeroed.
Result<void> transcode_page(const ModelGeometry& geometry, const PageLayout& from, const std::byte* src,
                            const PageLayout& to, std::byte* dst);

// One block (one layer and KV head), as transcode_page applies it; for tests and tools.
Result<void> quantize_block(Format format, std::uint32_t head_dim, Dtype dtype, const std::byte* dense, std::byte* out);
void dequantize_block(Format format, std::uint32_t head_dim, Dtype dtype, const std::byte* block, std::byte* dense);

// --- this machine --------------------------------------------------------------------------------------------------

// Names of the instruction sets that this build has code for and this CPU runs, best first, separated by spaces; empty
// when there is none (the message for an unsupported CPU). Static storage.
const char* supported_targets();
const char* best_target_name();

}  // namespace kvq
