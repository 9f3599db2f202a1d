// Places, tables and entries follow from a fixed seed; the oracle sees copies of one head's blocks as pages of a model
// that has nothing else.
#include "tests/bench/gpu_attend/workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "kernels/cuda/cuda_transcode.h"
#include "kernels/half.h"
#include "kernels/oracle.h"
#include "tests/bench/gpu_attend/timing.h"

namespace kvq::bench {
namespace {

constexpr double kRotationBytes = 3.0 * (1 << 30), kTolerance = 2e-3;
constexpr double kMostSets = 200, kMostSetsOfChunks = 12;  // a chunk reads each page so often that the cache hides none
constexpr std::uint32_t kChunkQueries = 64;
constexpr std::uint32_t kSourcePages = 64;  // dense pages that cold ones are made of
constexpr std::uint32_t kBatchPages = 2048;

template <typename T>
T must_have(Result<T> result, const char* what) {
  if (!result) throw std::runtime_error(std::string(what) + ": " + result.error().context);
  return std::move(*result);
}

const char* name_of(Format format) {
  constexpr const char* kNames[] = {"none", "dense", "int4", "int4_k4", "int4_k8", "k8v4"};
  return kNames[static_cast<std::size_t>(format)];
}

}  // namespace

std::string Shape::text() const {
  const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
  std::ostringstream out;
  if (*least == *most) {
    out << lengths.size() << "x" << *most;
  } else {
    out << lengths.size() << " of " << *least << ".." << *most;
  }
  if (queries != 1) out << ", " << queries << " queries";
  if (kv_heads != 8 || group != 4) out << ", " << kv_heads << " KV heads, group " << group;
  if (head_dim != 128) out << ", d " << head_dim;
  if (layers != 1) out << ", " << layers << " layers";
  if (dense_share > 0 && dense_share < 1) out << ", " << std::lround(100 * dense_share) << " % dense";
  return out.str();
}

Arena::Arena(std::uint64_t cold_bytes, std::uint64_t dense_bytes)
    : cold_bytes_(cold_bytes), memory_(cold_bytes + dense_bytes) {
  void* word = nullptr;
  MUST(cudaHostAlloc(&word, sizeof(std::uint64_t), cudaHostAllocMapped));
  fault_.reset(new (word) std::uint64_t{0});
  fill_halves(base() + cold_bytes, dense_bytes / 2, 3);
}

Workload::Workload(const Arena& arena, const Shape& shape) : arena_(arena), shape_(shape) {
  geometry_.layers = shape.layers;
  for (std::uint32_t l = 0; l < shape.layers; ++l)
    geometry_.layer[l] = {shape.kv_heads, shape.head_dim, Dtype::fp16, 0};
  for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts_[f] = make_layout(geometry_, static_cast<Format>(f));
  const auto sequences = static_cast<std::uint32_t>(shape.lengths.size());
  stride_ = (*std::max_element(shape.lengths.begin(), shape.lengths.end()) + kPageTokens - 1) / kPageTokens;
  std::mt19937_64 random(11);
  place_pages(random);
  query_.resize(std::size_t{sequences} * shape.queries * shape.kv_heads * shape.group * shape.head_dim);
  q_ = std::make_unique<test::DeviceBytes>(query_.size() * 2);
  out_ = std::make_unique<test::DeviceBytes>(query_.size() * 2);
  fill_halves(q_->as<void>(), query_.size(), 5);
  query_ = q_->read<std::uint16_t>();
  std::vector<std::int32_t> starts(sequences + 1);
  for (std::uint32_t s = 0; s <= sequences; ++s) starts[s] = static_cast<std::int32_t>(s * shape.queries);
  starts_ = std::make_unique<test::DeviceBytes>(starts);
  lengths_ = std::make_unique<test::DeviceBytes>(shape.lengths);
  entries_on_gpu_ = std::make_unique<test::DeviceBytes>(entries_);
  tables_on_gpu_ = std::make_unique<test::DeviceBytes>(tables_);
  workspace_ = std::make_unique<test::DeviceBytes>(must_have(
      cuda::workspace_bytes({&geometry_, layouts_.data()}, shape.kv_heads * shape.group), "attention's workspace"));
  if (shape.growing) place_new_tokens();
}

void Workload::place_pages(std::mt19937_64& random) {
  const auto cold = static_cast<std::size_t>(shape_.cold);
  const std::uint64_t cold_bytes = layouts_[cold].page_bytes, dense_bytes = layouts_[1].page_bytes;
  double pages = 0;  // of one set
  for (const std::int32_t length : shape_.lengths) pages += (length + kPageTokens - 1) / kPageTokens;
  const double mean = shape_.dense_share * static_cast<double>(dense_bytes) +
                      (1 - shape_.dense_share) * static_cast<double>(cold_bytes);
  const double most = shape_.queries < kChunkQueries ? kMostSets : kMostSetsOfChunks;
  sets_ = shape_.layers > 1 ? 1 : static_cast<int>(std::clamp(kRotationBytes / (pages * mean), 2.0, most));
  std::vector<std::uint64_t> places[2] = {std::vector<std::uint64_t>(arena_.cold_bytes() / cold_bytes),
                                          std::vector<std::uint64_t>(arena_.dense_bytes() / dense_bytes)};
  for (std::uint64_t i = 0; i < places[0].size(); ++i) places[0][i] = i * cold_bytes;
  for (std::uint64_t i = 0; i < places[1].size(); ++i) places[1][i] = arena_.cold_bytes() + i * dense_bytes;
  for (auto& p : places) std::shuffle(p.begin(), p.end(), random);
  entries_.assign(1, pack_entry({0, Format::none, EntryState::null, 0}));
  tables_.assign(static_cast<std::size_t>(sets_) * shape_.lengths.size() * stride_, 0);
  std::uint64_t used[2] = {};
  std::uniform_real_distribution<> share;
  for (int set = 0; set < sets_; ++set) {
    for (std::size_t s = 0; s < shape_.lengths.size(); ++s) {
      for (std::int32_t page = 0; page * kPageTokens < static_cast<std::uint32_t>(shape_.lengths[s]); ++page) {
        const bool open = shape_.growing && (page + 1) * kPageTokens >= static_cast<std::uint32_t>(shape_.lengths[s]);
        const int dense = open || share(random) < shape_.dense_share;
        const std::uint64_t at = places[dense][used[dense]++ % places[dense].size()];
        tables_[(set * shape_.lengths.size() + s) * stride_ + page] = static_cast<std::int32_t>(entries_.size());
        entries_.push_back(pack_entry({1, dense ? Format::dense : shape_.cold, EntryState::sealed, at}));
      }
    }
  }
  page_bytes_ = static_cast<double>(used[0] * cold_bytes + used[1] * dense_bytes) / sets_;
  places[0].resize(std::min<std::uint64_t>(used[0], places[0].size()));
  quantize(places[0]);
}

void Workload::quantize(const std::vector<std::uint64_t>& places) const {
  const auto transcoder = must_have(cuda::Transcoder::create(kBatchPages, 1, nullptr), "a transcoder");
  std::vector<cuda::PageJob> jobs;
  std::vector<cuda::PageJobDone> done;
  for (std::size_t first = 0; first < places.size(); first += kBatchPages) {
    jobs.clear();
    for (std::size_t i = first; i < std::min<std::size_t>(places.size(), first + kBatchPages); ++i) {
      jobs.push_back({.source = arena_.base() + arena_.cold_bytes() + i % kSourcePages * layouts_[1].page_bytes,
                      .destination = arena_.base() + places[i]});
    }
    const std::uint32_t ticket =
        must_have(transcoder->launch(geometry_, layouts_[1], &layouts_[static_cast<std::size_t>(shape_.cold)], jobs),
                  "transcode");
    while (!must_have(transcoder->is_done(ticket), "transcode")) {
    }
    done.resize(jobs.size());
    transcoder->collect(ticket, done);
    for (const cuda::PageJobDone& d : done) {
      if (d.code != Errc::ok) throw std::runtime_error(std::string("a page cannot become ") + name_of(shape_.cold));
    }
  }
}

// Of every sequence the last token's K and V, alike in all layers.
void Workload::place_new_tokens() {
  std::vector<std::int64_t> slots;
  for (std::size_t s = 0; s < shape_.lengths.size(); ++s) {
    const auto last = static_cast<std::uint32_t>(shape_.lengths[s] - 1);
    slots.push_back(std::int64_t{tables_[s * stride_ + last / kPageTokens]} * kPageTokens + last % kPageTokens);
  }
  slots_ = std::make_unique<test::DeviceBytes>(slots);
  new_tokens_ = std::make_unique<test::DeviceBytes>(slots.size() * shape_.kv_heads * shape_.head_dim * 2);
  fill_halves(new_tokens_->as<void>(), new_tokens_->bytes() / 2, 6);
}

PageSource Workload::pages() const {
  return {entries_on_gpu_->as<const DirectoryEntry>(), static_cast<std::uint32_t>(entries_.size()), arena_.base()};
}

AttentionCall Workload::call_of(int set, std::uint32_t layer) const {
  const std::int64_t token = std::int64_t{shape_.kv_heads} * shape_.group * shape_.head_dim;
  AttentionCall call;
  call.model = {&geometry_, layouts_.data()};
  call.pages = pages();
  call.layer = layer;
  call.batch = static_cast<std::uint32_t>(shape_.lengths.size());
  call.block_tables = tables_on_gpu_->as<std::int32_t>() + static_cast<std::size_t>(set) * call.batch * stride_;
  call.block_table_stride = stride_;
  call.lengths = lengths_->as<std::int32_t>();
  call.query_starts = starts_->as<std::int32_t>();
  call.query_heads = shape_.kv_heads * shape_.group;
  call.q = q_->as<void>();
  call.out = out_->as<void>();
  call.q_token_stride = call.out_token_stride = token;
  call.q_head_stride = call.out_head_stride = shape_.head_dim;
  return call;
}

void Workload::enqueue_append(std::uint32_t layer, cudaStream_t stream) const {
  AppendCall call;
  call.model = {&geometry_, layouts_.data()};
  call.pages = pages();
  call.layer = layer;
  call.k = call.v = new_tokens_->as<void>();
  call.k_token_stride = call.v_token_stride = std::int64_t{shape_.kv_heads} * shape_.head_dim;
  call.k_head_stride = call.v_head_stride = shape_.head_dim;
  call.slots = slots_->as<std::int64_t>();
  call.tokens = static_cast<std::uint32_t>(shape_.lengths.size());
  if (const Result<void> done = cuda::append(call, {.stream = stream, .fault = arena_.fault()}); !done) {
    throw std::runtime_error(shape_.text() + ": " + done.error().context);
  }
}

void Workload::enqueue(int set, cudaStream_t stream, std::uint32_t layer) const {
  const cuda::Launch launch{.stream = stream,
                            .fault = arena_.fault(),
                            .workspace = workspace_->as<void>(),
                            .workspace_bytes = workspace_->bytes(),
                            .max_query_tokens = shape_.queries};
  if (const Result<void> done = cuda::attend(call_of(set, layer), launch); !done) {
    throw std::runtime_error(shape_.text() + ": " + done.error().context);
  }
}

double Workload::flops() const {
  double keys = 0;  // that query tokens see
  for (const std::int32_t length : shape_.lengths) {
    keys += static_cast<double>(shape_.queries) * (length - (shape_.queries - 1) / 2.0);
  }
  return keys * 4.0 * shape_.head_dim * shape_.kv_heads * shape_.group;
}

double Workload::check(std::uint32_t layer) const {
  MUST(cudaMemset(out_->as<void>(), 0xff, out_->bytes()));  // NaN
  if (shape_.growing) enqueue_append(layer, nullptr);
  enqueue(0, nullptr, layer);
  MUST(cudaDeviceSynchronize());
  if (*static_cast<const volatile std::uint64_t*>(arena_.fault()) != 0)
    throw std::runtime_error(shape_.text() + ": attention met a fault");
  const std::vector<std::uint16_t> out = out_->read<std::uint16_t>();
  const auto last = static_cast<std::uint32_t>(shape_.lengths.size() - 1);
  const double worst =
      std::max(row_error(layer, 0, 0, 0, out), row_error(layer, last, shape_.queries - 1, shape_.kv_heads - 1u, out));
  if (!(worst < kTolerance)) {
    throw std::runtime_error(shape_.text() + ": attention is " + std::to_string(worst) + " away from the oracle");
  }
  return worst;
}

// The rows of one query token and KV head, by the oracle over copies of that head's blocks.
double Workload::row_error(std::uint32_t layer, std::uint32_t sequence, std::uint32_t token, std::uint32_t kv_head,
                           const std::vector<std::uint16_t>& out) const {
  ModelGeometry geometry;
  geometry.layers = 1;
  geometry.layer[0] = {1, shape_.head_dim, Dtype::fp16, 0};
  std::vector<PageLayout> layouts(kFormatCount);
  for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts[f] = make_layout(geometry, static_cast<Format>(f));
  const std::int32_t length = shape_.lengths[sequence] - static_cast<std::int32_t>(shape_.queries - 1 - token);
  const std::uint32_t pages = (length + kPageTokens - 1) / kPageTokens;
  std::vector<DirectoryEntry> entries(pages + 1);
  std::vector<std::int32_t> table(pages);
  std::vector<std::byte> bytes;
  for (std::uint32_t i = 0; i < pages; ++i) {
    const Entry entry = unpack_entry(entries_[tables_[sequence * stride_ + i]]);
    const PageLayout& whole = layouts_[static_cast<std::size_t>(entry.format)];
    const std::uint64_t size = layouts[static_cast<std::size_t>(entry.format)].page_bytes, at = bytes.size();
    bytes.resize(at + size);
    MUST(cudaMemcpy(bytes.data() + at,
                    arena_.base() + entry.offset_bytes + whole.layer[layer].offset_bytes +
                        std::uint64_t{kv_head} * whole.layer[layer].head_bytes,
                    block_bytes(entry.format, shape_.head_dim), cudaMemcpyDeviceToHost));
    entries[i + 1].store(pack_entry({1, entry.format, EntryState::sealed, at}));
    table[i] = static_cast<std::int32_t>(i + 1);
  }
  const std::int32_t starts[2] = {0, 1};
  const std::size_t first =
      ((std::size_t{sequence} * shape_.queries + token) * shape_.kv_heads + kv_head) * shape_.group * shape_.head_dim;
  AttentionCall call{.model = {&geometry, layouts.data()},
                     .pages = {entries.data(), pages + 1, bytes.data()},
                     .batch = 1,
                     .block_tables = table.data(),
                     .block_table_stride = pages,
                     .lengths = &length,
                     .query_starts = starts};
  call.q = query_.data() + first;
  call.q_token_stride = std::int64_t{shape_.group} * shape_.head_dim;
  call.q_head_stride = shape_.head_dim;
  call.query_heads = shape_.group;
  double error = 0, norm = 0;
  const std::vector<oracle::Row> rows = oracle::attend(call);
  for (std::uint32_t h = 0; h < shape_.group; ++h) {
    for (std::uint32_t c = 0; c < shape_.head_dim; ++c) {
      const double want = rows[h].out[c];
      const double got = half_to_float(out[first + std::size_t{h} * shape_.head_dim + c]);
      error += (got - want) * (got - want);
      norm += want * want;
    }
  }
  return std::sqrt(error / norm);
}

}  // namespace kvq::bench
