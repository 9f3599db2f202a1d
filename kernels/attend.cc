// Attention's front: checks every argument, resolves every page once, splits the work, joins the parts.
//
// Invariant: an item reaches the arithmetic only after all of the call was found valid, so an error leaves nothing half
// computed that a caller could take for a result. The split depends on shapes and `threads` alone.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attend_item.h"
#include "kernels/page_lookup.h"
#include "kernels/targets.h"
#include "kernels/thread_pool.h"

namespace kvq {
namespace {

constexpr std::uint32_t kMinSplitPages = 8;   // fewer pages than this are not worth a thread
constexpr std::uint32_t kItemsPerThread = 3;  // enough that the slowest item does not set the time

// Kept per thread and reused: a call allocates only when it is larger than any before it.
struct Workspace {
  std::vector<ResolvedPage> pages;
  std::vector<AttendItem> items;  // what the workers run
  std::vector<AttendItem> tiles;  // the undivided tiles, where parts have to be joined
  std::vector<float> partials;
  std::vector<std::size_t> offsets;  // of each sequence in `pages`
};

Error refuse(const char* why) { return {Errc::invalid_argument, 0, why}; }

Error check_call(const AttentionCall& call) {
  if (Error error = check_attention(call); error.code != Errc::ok) return error;
  if (!has_vector_unit()) return {Errc::system, 0, "CPU has no supported vector instructions (SSSE3 at least)"};
  if (call.threads < 1 || call.threads > kMaxThreads) return refuse("threads is not 1..256");
  if (call.batch == 0) return {};
  for (std::uint32_t s = 0; s < call.batch; ++s) {
    if (call.lengths[s] < 0) return refuse("a length is negative");
    if (call.query_starts[s] < 0 || call.query_starts[s + 1] < call.query_starts[s]) {
      return refuse("query_starts does not ascend from 0 or more");
    }
  }
  if (call.query_starts[call.batch] == call.query_starts[0]) return {};
  if (call.q == nullptr || call.out == nullptr) return refuse("q or out is null");
  return {};
}

struct PageRange {
  std::uint32_t begin, end;
};

// Pages that tokens first .. last of a sequence see; positions ascend, so the two ends decide.
PageRange visible_pages(const AttentionCall& call, std::uint32_t sequence, std::int64_t first, std::int64_t last) {
  const std::int64_t length = call.lengths[sequence];
  const Visible low = visible_keys(call, query_position(call, sequence, first), length);
  const Visible high = visible_keys(call, query_position(call, sequence, last), length);
  if (low.begin >= high.end) return {0, 0};
  return {static_cast<std::uint32_t>(low.begin / kPageTokens),
          static_cast<std::uint32_t>((high.end + kPageTokens - 1) / kPageTokens)};
}

Error resolve_pages(const AttentionCall& call, std::uint32_t sequence, PageRange range, ResolvedPage* out) {
  if (range.begin == range.end) return {};
  if (call.block_tables == nullptr) return refuse("block_tables is null");
  if (range.end > call.block_table_stride) return refuse("a length needs more pages than block_table_stride");
  if (call.pages.entries == nullptr || call.pages.arena == nullptr) return refuse("page source is null");
  const std::int32_t* table = call.block_tables + sequence * call.block_table_stride;
  for (std::uint32_t page = range.begin; page < range.end; ++page) {
    Entry entry{};
    if (Error error = lookup_page(call.pages, table[page], entry); error.code != Errc::ok) return error;
    ResolvedPage& place = out[page - range.begin];
    place = {};
    if (entry.state == EntryState::null) continue;
    LayerPlace at{};
    if (!find_place(call.model, entry.format, call.layer, at)) {
      return {Errc::wrong_layout, 0, "page has a format that the model has no layout for"};
    }
    place = {call.pages.arena + entry.offset_bytes, at.format, at.offset_bytes, at.head_bytes};
  }
  return {};
}

// How many heads one item takes: as many as its rows allow, but with threads that a short sequence could not occupy by
// its pages, few enough that the heads do.
std::uint32_t heads_together(const AttentionCall& call, PageRange range, std::uint64_t rows) {
  const std::uint32_t kv_heads = call.model.geometry->layer[call.layer].kv_heads;
  const std::uint32_t most = kItemRows / static_cast<std::uint32_t>(std::min<std::uint64_t>(rows, kRowTile));
  const std::uint32_t threads = static_cast<std::uint32_t>(call.threads);
  const bool enough = call.batch >= threads || (range.end - range.begin) / kMinSplitPages >= threads;
  const std::uint32_t fair = enough ? kv_heads : std::max(1u, kv_heads / threads);
  return std::max(1u, std::min({most, fair, kv_heads}));
}

// Resolves the pages of every sequence and lists the tiles, which point into `work.pages` once it has stopped growing.
Error list_tiles(const AttentionCall& call, Workspace& work) {
  const LayerSpec& spec = call.model.geometry->layer[call.layer];
  const std::uint32_t group = call.query_heads / spec.kv_heads;
  const float scale = call.scale != 0 ? call.scale : 1.0f / std::sqrt(static_cast<float>(spec.head_dim));
  std::vector<std::size_t>& offset = work.offsets;
  offset.resize(call.batch);
  std::size_t total = 0;
  for (std::uint32_t s = 0; s < call.batch; ++s) {
    const std::int64_t tokens = call.query_starts[s + 1] - call.query_starts[s];
    offset[s] = total;
    if (tokens == 0) continue;
    const PageRange range = visible_pages(call, s, 0, tokens - 1);
    total += range.end - range.begin;
    work.pages.resize(total);
    if (Error error = resolve_pages(call, s, range, work.pages.data() + offset[s]); error.code != Errc::ok)
      return error;
  }
  for (std::uint32_t s = 0; s < call.batch; ++s) {
    const std::int64_t tokens = call.query_starts[s + 1] - call.query_starts[s];
    if (tokens == 0) continue;
    const PageRange range = visible_pages(call, s, 0, tokens - 1);
    const std::uint64_t rows = static_cast<std::uint64_t>(tokens) * group;
    const std::uint32_t together = heads_together(call, range, rows);
    for (std::uint32_t head = 0; head < spec.kv_heads; head += together) {
      const std::uint32_t heads = std::min(together, spec.kv_heads - head);
      for (std::uint64_t first = 0; first < rows; first += kRowTile) {
        const auto count = static_cast<std::uint32_t>(std::min<std::uint64_t>(kRowTile, rows - first));
        const PageRange seen = visible_pages(call, s, static_cast<std::int64_t>(first / group),
                                             static_cast<std::int64_t>((first + count - 1) / group));
        work.tiles.push_back({&call, work.pages.data() + offset[s], range.begin, s, group, head, heads,
                              static_cast<std::uint32_t>(first), count, seen.begin, seen.end, scale, nullptr});
      }
    }
  }
  return {};
}

std::size_t state_floats(const AttendItem& tile, std::uint32_t d) { return tile.heads * head_state_floats(tile, d); }

std::uint32_t part_count(const AttendItem& tile, std::size_t tiles, int threads) {
  const std::size_t wanted = static_cast<std::size_t>(threads) * kItemsPerThread;
  if (threads == 1 || tiles >= wanted) return 1;
  const std::size_t parts = (wanted + tiles - 1) / tiles;
  const std::size_t most = (tile.page_end - tile.page_begin) / kMinSplitPages;
  return static_cast<std::uint32_t>(std::max<std::size_t>(1, std::min(parts, most)));
}

// Cuts long tiles into parts of equal page counts, each with its own partial state.
void split_tiles(const AttentionCall& call, Workspace& work, std::uint32_t d) {
  std::size_t floats = 0;
  for (const AttendItem& tile : work.tiles) {
    const std::uint32_t parts = part_count(tile, work.tiles.size(), call.threads);
    if (parts > 1) floats += parts * state_floats(tile, d);
  }
  work.partials.resize(floats + 16);
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(work.partials.data());
  float* const partials = work.partials.data() + (round_up(start, 64) - start) / sizeof(float);
  floats = 0;
  for (AttendItem& tile : work.tiles) {
    const std::uint32_t parts = part_count(tile, work.tiles.size(), call.threads);
    const std::uint64_t pages = tile.page_end - tile.page_begin;
    if (parts > 1) tile.partial = partials + floats;  // marks the tile as one to join
    for (std::uint32_t part = 0; part < parts; ++part) {
      AttendItem item = tile;
      item.page_begin = tile.page_begin + static_cast<std::uint32_t>(pages * part / parts);
      item.page_end = tile.page_begin + static_cast<std::uint32_t>(pages * (part + 1) / parts);
      if (parts > 1) {
        item.partial = partials + floats;
        floats += state_floats(tile, d);
      }
      work.items.push_back(item);
    }
  }
}

// Joins one head's state b into a: both are maxima, sums, outputs.
void join_states(float* a, const float* b, std::uint32_t rows, std::size_t outputs, std::uint32_t d) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  for (std::uint32_t r = 0; r < rows; ++r) {
    const float top = std::max(a[r], b[r]);
    const float keep = a[r] == kEmpty ? (top == kEmpty ? 1.0f : 0.0f) : std::exp(a[r] - top);
    const float take = b[r] == kEmpty ? (top == kEmpty ? 1.0f : 0.0f) : std::exp(b[r] - top);
    a[r] = top;
    a[rows + r] = a[rows + r] * keep + b[rows + r] * take;
    float* out = a + outputs + std::size_t{r} * d;
    const float* more = b + outputs + std::size_t{r} * d;
    for (std::uint32_t c = 0; c < d; ++c) out[c] = out[c] * keep + more[c] * take;
  }
}

void run_one(void* context, std::size_t index) { attend_item(static_cast<Workspace*>(context)->items[index]); }

}  // namespace

Result<void> attend(const AttentionCall& call) {
  if (Error error = check_call(call); error.code != Errc::ok) return error;
  static thread_local Workspace work;
  work.pages.clear();
  work.items.clear();
  work.tiles.clear();
  if (Error error = list_tiles(call, work); error.code != Errc::ok) return error;
  const std::uint32_t d = call.model.geometry->layer[call.layer].head_dim;
  split_tiles(call, work, d);
  run_items(work.items.size(), call.threads, run_one, &work);
  for (const AttendItem& tile : work.tiles) {
    if (tile.partial == nullptr) continue;
    const std::uint32_t parts = part_count(tile, work.tiles.size(), call.threads);
    for (std::uint32_t part = 1; part < parts; ++part) {
      for (std::uint32_t h = 0; h < tile.heads; ++h) {
        float* state = tile.partial + h * head_state_floats(tile, d);
        join_states(state, state + part * state_floats(tile, d), tile.rows, state_outputs(tile), d);
      }
    }
    finish_item(tile, tile.partial);
  }
  return {};
}

}  // namespace kvq
