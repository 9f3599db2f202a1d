// Invariant: the comparison's bound is the one that kernels/attend_simd.cc states for fp32 output.
#include "tests/support/tiny_model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include "client/abi.h"
#include "kernels/half.h"

namespace kvq::test {
namespace {

constexpr double kValueError = 0x1p-13, kDenseError = 0x1p-20;
constexpr std::size_t kMostChanged = 12;  // pages of one call whose every mix is tried

std::uint64_t mix(std::uint64_t x) {  // splitmix64's finalizer
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

kvq_model_desc describe(const ModelOptions& options, std::vector<kvq_layer>& layers) {
  layers.assign(kLayers, kvq_layer{kKvHeads, kHeadDim, KVQ_FP16, 0, kQueryHeads});
  kvq_model_desc desc{};
  desc.size = sizeof(desc);
  desc.layers = layers.data();
  desc.layer_count = kLayers;
  desc.page_tokens = KVQ_PAGE_TOKENS;
  std::memset(desc.fingerprint, options.fingerprint, sizeof(desc.fingerprint));
  desc.role = options.role;
  desc.format_floor_dense = options.floor_dense;
  desc.device = options.device;
  desc.credits = options.credits;
  desc.deadline_ms = 20'000;
  return desc;
}

Model make_model(Client& client, const ModelOptions& options) {
  std::vector<kvq_layer> layers;
  const kvq_model_desc desc = describe(options, layers);
  return Model(client, desc);
}

ModelGeometry geometry() {
  ModelGeometry g;
  g.layers = kLayers;
  for (std::uint32_t i = 0; i < kLayers; ++i) g.layer[i] = {kKvHeads, kHeadDim, Dtype::fp16, 0};
  return g;
}

// One attention call: the directory's words for its block table before and after, and what came out.
struct Call {
  std::vector<std::uint64_t> before, after;
  std::vector<float> out;
};

// A page that is sealed meanwhile stays where and what it is, so open counts as sealed.
std::vector<std::uint64_t> entry_words(const client::Model& model, const std::vector<std::int32_t>& table) {
  std::vector<std::uint64_t> out;
  for (const std::int32_t page : table) {
    Entry entry = unpack_entry(model.memory().entries()[page].load(std::memory_order_acquire));
    if (entry.state == EntryState::open) entry.state = EntryState::sealed;
    out.push_back(pack_entry(entry));
  }
  return out;
}

// The oracle's answer for a block table of given entry words, put together from its answers for single pages, so that
// the same page is not computed again for each mix. All of it inside the step that the words were read in: their places
// are still intact.
class Expected {
 public:
  Expected(const client::Model& model, const AttentionCall& call, std::int32_t length)
      : arena_(model.memory().arena()), call_(call), length_(length) {
    layouts_.resize(kFormatCount);
    for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts_[f] = make_layout(geometry_, static_cast<Format>(f));
  }

  bool matches(const std::vector<std::uint64_t>& words, const std::vector<float>& out) {
    for (std::uint32_t head = 0; head < kQueryHeads; ++head) {
      const oracle::Row row = merged(words, head);
      const double bound =
          (std::expm1(2 * row.logit_error) + (row.quantized ? kValueError : kDenseError)) * row.max_value;
      for (std::uint32_t c = 0; c < kHeadDim; ++c) {
        if (!(std::fabs(out[head * kHeadDim + c] - row.out[c]) <= bound + 0x1p-23 * std::fabs(row.out[c]) + 0x1p-24))
          return false;
      }
    }
    return true;
  }

 private:
  const std::vector<oracle::Row>& page(std::size_t place, std::uint64_t word) {
    auto& rows = pages_[{place, word}];
    if (!rows.empty()) return rows;
    std::vector<DirectoryEntry> entries(2);
    entries[0].store(pack_entry({0, Format::none, EntryState::null, 0}));
    entries[1].store(word);
    const std::int32_t one = 1, tokens = std::min<std::int32_t>(
                                    length_ - static_cast<std::int32_t>(place * kPageTokens), kPageTokens);
    AttentionCall call = call_;
    call.model = {&geometry_, layouts_.data()};
    call.pages = {entries.data(), 2, arena_};
    call.block_tables = &one;
    call.block_table_stride = 1;
    call.lengths = &tokens;
    return rows = oracle::attend(call);
  }

  oracle::Row merged(const std::vector<std::uint64_t>& words, std::uint32_t head) {
    oracle::Row sum;
    sum.out.assign(kHeadDim, 0);
    double highest = -INFINITY, weight = 0;
    for (std::size_t i = 0; i < words.size(); ++i) highest = std::max(highest, page(i, words[i])[head].lse);
    for (std::size_t i = 0; i < words.size(); ++i) {
      const oracle::Row& row = page(i, words[i])[head];
      const double w = std::exp(row.lse - highest);
      weight += w;
      for (std::uint32_t c = 0; c < kHeadDim; ++c) sum.out[c] += w * row.out[c];
      sum.logit_error = std::max(sum.logit_error, row.logit_error);
      sum.max_value = std::max(sum.max_value, row.max_value);
      sum.quantized |= row.quantized;
    }
    for (double& x : sum.out) x /= weight;
    return sum;
  }

  const ModelGeometry geometry_ = geometry();
  std::vector<PageLayout> layouts_;
  std::byte* const arena_;
  const AttentionCall call_;
  const std::int32_t length_;
  std::map<std::pair<std::size_t, std::uint64_t>, std::vector<oracle::Row>> pages_;
};

// Compares one call with each mix that its pages may have had, and counts it.
void check_call(Expected& expected, const Call& call, Seen& seen) {
  std::vector<std::size_t> changed;
  std::size_t quantized = 0;
  for (std::size_t i = 0; i < call.before.size(); ++i) {
    if (call.before[i] != call.after[i]) changed.push_back(i);
    if (unpack_entry(call.after[i]).format != Format::dense) ++quantized;
  }
  ++seen.calls;
  if (changed.empty()) ++seen.exact;
  ++(quantized == 0 ? seen.dense : quantized + 1 < call.after.size() ? seen.mixed : seen.quantized);
  if (changed.size() > kMostChanged) throw std::runtime_error("more pages changed during one call than can be checked");
  for (std::uint32_t choice = 0; choice < (1u << changed.size()); ++choice) {
    std::vector<std::uint64_t> words = call.before;
    for (std::size_t i = 0; i < changed.size(); ++i) {
      if ((choice >> i & 1) != 0) words[changed[i]] = call.after[changed[i]];
    }
    if (expected.matches(words, call.out)) return;
  }
  throw std::runtime_error("attention differs from the oracle; " + std::to_string(changed.size()) +
                           " pages changed meanwhile, " + std::to_string(quantized) + " of " +
                           std::to_string(call.after.size()) + " are quantized");
}

}  // namespace

std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("KVQ_TEST_SEED");
    const std::uint64_t value = given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device()();
    std::fprintf(stderr, "KVQ_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

std::uint16_t element(std::uint32_t layer, bool v, std::uint64_t position, std::uint32_t token, std::uint32_t channel) {
  const std::uint64_t where =
      (std::uint64_t{layer} << 1 | v) ^ (position << 8) ^ (std::uint64_t{token} << 32) ^ (std::uint64_t{channel} << 50);
  const auto bits = static_cast<double>(mix(where + 0x9e3779b97f4a7c15ull) >> 11) * 0x1p-53;
  return float_to_half(static_cast<float>(4 * bits - 2));
}

std::vector<std::uint32_t> token_stream(std::uint32_t stream, std::size_t count) {
  std::vector<std::uint32_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i)
    tokens[i] = static_cast<std::uint32_t>(mix(std::uint64_t{stream} << 32 | i) % 50'000);
  return tokens;
}

TinyModel::TinyModel(const std::string& socket, const ModelOptions& options)
    : client_(socket, options.label), model_(make_model(client_, options)) {}

void TinyModel::append(Sequence& sequence, std::uint64_t first, const std::vector<std::uint32_t>& tokens) {
  const std::vector<std::int64_t> slots = sequence.slot_mapping(first, tokens.size());
  std::vector<std::uint16_t> k(tokens.size() * kHeadDim), v(k.size());
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::uint32_t c = 0; c < kHeadDim; ++c) {
        k[t * kHeadDim + c] = element(layer, false, first + t, tokens[t], c);
        v[t * kHeadDim + c] = element(layer, true, first + t, tokens[t], c);
      }
    }
    kvq_append_args args{};
    args.size = sizeof(args);
    args.layer = layer;
    args.tokens = static_cast<std::uint32_t>(tokens.size());
    args.k = k.data();
    args.v = v.data();
    args.k_token_stride = args.v_token_stride = kHeadDim;
    args.k_head_stride = args.v_head_stride = kHeadDim;
    args.slots = slots.data();
    model_.append(args);
  }
}

void TinyModel::write(Sequence& sequence, std::uint64_t first, const std::vector<std::uint32_t>& tokens,
                      std::uint32_t deadline_ms, bool commit) {
  sequence.reserve(tokens.size(), deadline_ms);
  Step step(model_);
  append(sequence, first, tokens);
  step.end();
  if (commit) sequence.commit(tokens, step.serial());
}

Seen TinyModel::attend_and_check(const std::vector<std::int32_t>& block_table, std::int32_t length, std::uint32_t layer,
                                 std::uint64_t seed, std::uint32_t calls) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(kQueryHeads * kHeadDim);
  for (float& x : q) x = normal(random);
  const std::int32_t starts[] = {0, 1};
  const std::vector<std::int32_t> table(block_table.begin(),
                                        block_table.begin() + (length + KVQ_PAGE_TOKENS - 1) / KVQ_PAGE_TOKENS);
  kvq_attend_args args{};
  args.size = sizeof(args);
  args.layer = layer;
  args.batch = 1;
  args.q = q.data();
  args.q_token_stride = args.out_token_stride = kQueryHeads * kHeadDim;
  args.q_head_stride = args.out_head_stride = kHeadDim;
  args.q_dtype = args.out_dtype = KVQ_FP32;
  args.query_starts = starts;
  args.seq_lengths = &length;
  args.block_table = table.data();
  args.block_table_stride = static_cast<std::int64_t>(table.size());
  args.query_heads = kQueryHeads;
  args.window = -1;
  args.threads = 1;
  AttentionCall call{.layer = layer, .batch = 1, .query_starts = starts, .q = q.data(), .q_type = Real::fp32};
  call.q_token_stride = args.q_token_stride;
  call.q_head_stride = args.q_head_stride;
  call.query_heads = kQueryHeads;
  call.out_type = Real::fp32;

  const client::Model& inner = *model_.get()->model;
  std::vector<Call> made(calls);
  const Step step(model_);
  for (Call& one : made) {
    one.out.assign(q.size(), NAN);
    args.out = one.out.data();
    one.before = entry_words(inner, table);
    model_.attend(args);
    one.after = entry_words(inner, table);
  }
  Expected expected(inner, call, length);
  Seen seen;
  for (const Call& one : made) check_call(expected, one, seen);
  return seen;
}

bool TinyModel::check_dense_bytes(std::int32_t page, std::uint64_t first, const std::uint32_t* tokens) {
  const client::Model& inner = *model_.get()->model;
  const Step step(model_);
  const Entry entry = inner.entry(PageId{static_cast<std::uint32_t>(page)});
  if (entry.format != Format::dense) return false;
  const PageLayout layout = make_layout(geometry(), Format::dense);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto* k = reinterpret_cast<const std::uint16_t*>(inner.memory().arena() + entry.offset_bytes +
                                                           layout.layer[layer].offset_bytes);
    for (std::uint32_t i = 0; i < 2 * KVQ_PAGE_TOKENS * kHeadDim; ++i) {
      const bool v = i >= KVQ_PAGE_TOKENS * kHeadDim;
      const std::uint32_t t = i / kHeadDim % KVQ_PAGE_TOKENS, c = i % kHeadDim;
      const std::uint16_t got = k[(v ? KVQ_PAGE_TOKENS * kHeadDim : 0) + dense_index(t, c, kHeadDim)];
      if (got != element(layer, v, first + t, tokens[t], c)) {
        throw std::runtime_error("page " + std::to_string(page) + " layer " + std::to_string(layer) + " token " +
                                 std::to_string(t) + " channel " + std::to_string(c) + " has wrong bytes");
      }
    }
  }
  return true;
}

}  // namespace kvq::test
