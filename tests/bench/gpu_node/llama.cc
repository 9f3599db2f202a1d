// Invariant: host arrays that an asynchronous copy reads are the caller's until synchronize(); this file synchronizes
// where it fills them.
#include "tests/bench/gpu_node/llama.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <random>
#include <stdexcept>

#include "kernels/half.h"

namespace kvq::bench {
namespace {

constexpr std::uint32_t kMaxBatch = 64;
constexpr std::uint64_t kMaxTableEntries = 1 << 20;

Model make_model(Client& client, std::uint32_t credits) {
  const std::vector<kvq_layer> layers(kLayers, kvq_layer{kKvHeads, kHeadDim, KVQ_FP16, 0, kQueryHeads});
  kvq_model_desc desc{};
  desc.size = sizeof desc;
  desc.layers = layers.data();
  desc.layer_count = kLayers;
  desc.page_tokens = KVQ_PAGE_TOKENS;
  desc.fingerprint[0] = 8;
  desc.credits = credits;
  desc.deadline_ms = 30'000;
  return Model(client, desc);
}

}  // namespace

Llama::Memory::Memory()
    : k(std::uint64_t{kChunkTokens} * kKvHeads * kHeadDim * 2),
      v(std::uint64_t{kChunkTokens} * kKvHeads * kHeadDim * 2),
      slots(kChunkTokens * 8),
      q(kMaxBatch * kQueryHeads * kHeadDim * 2),
      out(std::uint64_t{kLayers} * kMaxBatch * kQueryHeads * kHeadDim * 4),
      tables(kMaxTableEntries * 4),
      lengths(kMaxBatch * 4),
      starts((kMaxBatch + 1) * 4) {}

Llama::Llama(const std::string& socket, std::uint32_t seed, std::uint32_t credits)
    : seed_(seed), client_(socket, "bench"), model_(make_model(client_, credits)), memory_(std::make_unique<Memory>()) {
  must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
}

Llama::~Llama() {
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

// Hashed, so that no text repeats another: pages with equal ids would be taken for the same.
std::vector<std::uint32_t> Llama::tokens(std::uint64_t first, std::uint64_t count, std::uint32_t edition) const {
  std::vector<std::uint32_t> out(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t x = (first + i) ^ (std::uint64_t{edition} << 40) ^ (std::uint64_t{seed_} << 56);
    x = (x + 0x9e37'79b9'7f4a'7c15ULL) * 0xbf58'476d'1ce4'e5b9ULL;
    x = (x ^ (x >> 29)) * 0x94d0'49bb'1331'11ebULL;
    out[i] = static_cast<std::uint32_t>(x >> 33);
  }
  return out;
}

std::uint64_t Llama::cached(std::uint64_t count, std::uint32_t edition) const {
  return model_.lookup(tokens(0, count, edition)).cached_tokens;
}

Sequence Llama::open(std::uint64_t prefix_tokens, std::uint32_t edition) {
  return model_.open(tokens(0, prefix_tokens, edition));
}

Sequence Llama::open_dense() {
  kvq_open_options options{};
  options.size = sizeof options;
  options.format_floor_dense = 1;
  return model_.open({}, nullptr, &options);
}

Sequence Llama::open_private() {
  kvq_open_options options{};
  options.size = sizeof options;
  options.private_pages = 1;
  return model_.open({}, nullptr, &options);
}

void Llama::grow(Sequence& sequence, std::uint64_t first, std::uint64_t count, std::uint64_t text,
                 std::uint32_t deadline_ms, std::uint32_t edition) {
  std::vector<std::int64_t> slots(kChunkTokens);
  for (std::uint64_t at = 0; at < count; at += kChunkTokens) {
    const auto chunk = static_cast<std::uint32_t>(std::min<std::uint64_t>(kChunkTokens, count - at));
    sequence.reserve(chunk, deadline_ms);
    check(kvq_slot_mapping(sequence.get(), first + at, chunk, slots.data()));
    std::uint64_t step = 0;
    check(kvq_step_begin(model(), &step));
    must(cudaMemcpyAsync(memory_->slots.as<void>(), slots.data(), chunk * 8, cudaMemcpyHostToDevice, stream_), "slots");
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      fill_kv(memory_->k.as<void>(), memory_->v.as<void>(), seed_, layer, text + first + at, chunk, kKvHeads, kHeadDim,
              stream_);
      kvq_append_args args{};
      args.size = sizeof args;
      args.layer = layer;
      args.tokens = chunk;
      args.k = memory_->k.as<void>();
      args.v = memory_->v.as<void>();
      args.k_token_stride = args.v_token_stride = kKvHeads * kHeadDim;
      args.k_head_stride = args.v_head_stride = kHeadDim;
      args.slots = memory_->slots.as<std::int64_t>();
      args.stream = stream_;
      check(kvq_append(model(), &args));
    }
    check(kvq_step_end(model(), step, stream_));
    sequence.commit(tokens(text + first + at, chunk, edition), step);
    synchronize();  // `slots` is filled again
  }
}

void Llama::set_batch(const std::vector<const Sequence*>& sequences, const std::vector<std::int32_t>& lengths) {
  batch_ = static_cast<std::uint32_t>(sequences.size());
  std::vector<std::vector<std::int32_t>> rows;
  for (const Sequence* s : sequences) {
    std::size_t count = 0;
    kvq_block_table(s->get(), nullptr, 0, &count);
    std::vector<std::int32_t> row(count);
    check(kvq_block_table(s->get(), row.data(), count, &count));
    rows.push_back(std::move(row));
  }
  table_stride_ = 0;
  for (const auto& row : rows) table_stride_ = std::max<std::int64_t>(table_stride_, row.size());
  host_tables_.assign(batch_ * table_stride_, 0);
  host_starts_.assign(batch_ + 1, 0);
  host_lengths_ = lengths;
  for (std::uint32_t b = 0; b < batch_; ++b) {
    std::copy(rows[b].begin(), rows[b].end(), host_tables_.begin() + b * table_stride_);
    host_starts_[b + 1] = static_cast<std::int32_t>(b + 1);
  }
  if (batch_ > kMaxBatch || host_tables_.size() > kMaxTableEntries) throw std::runtime_error("the batch is too large");
  std::mt19937 random(seed_);
  std::normal_distribution<float> normal;
  host_q_.resize(std::size_t{batch_} * kQueryHeads * kHeadDim);
  for (std::uint16_t& q : host_q_) q = float_to_half(normal(random));
  upload_batch();
}

void Llama::upload_batch() {
  const auto put = [](void* to, const auto& from) {
    must(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice), "batch");
  };
  put(memory_->q.as<void>(), host_q_);
  put(memory_->tables.as<void>(), host_tables_);
  put(memory_->lengths.as<void>(), host_lengths_);
  put(memory_->starts.as<void>(), host_starts_);
  must(cudaDeviceSynchronize(), "batch");  // a small copy may still be on its way, and stream_ does not wait for it
}

float* Llama::out(std::uint32_t layer) const {
  return memory_->out.as<float>() + std::size_t{layer} * kMaxBatch * kQueryHeads * kHeadDim;
}

void Llama::attend(std::uint32_t layer) {
  kvq_attend_args args{};
  args.size = sizeof args;
  args.layer = layer;
  args.batch = batch_;
  args.q = memory_->q.as<void>();
  args.q_token_stride = args.out_token_stride = kQueryHeads * kHeadDim;
  args.q_head_stride = args.out_head_stride = kHeadDim;
  args.out = out(layer);
  args.q_dtype = KVQ_FP16;
  args.out_dtype = KVQ_FP32;
  args.query_starts = memory_->starts.as<std::int32_t>();
  args.seq_lengths = memory_->lengths.as<std::int32_t>();
  args.block_table = memory_->tables.as<std::int32_t>();
  args.block_table_stride = table_stride_;
  args.query_heads = kQueryHeads;
  args.window = -1;
  args.stream = stream_;
  args.max_query_tokens = 1;
  check(kvq_attend(model(), &args));
}

void Llama::launch_layers() {
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) attend(layer);
}

void Llama::decode() {
  std::uint64_t step = 0;
  check(kvq_step_begin(model(), &step));
  launch_layers();
  check(kvq_step_end(model(), step, stream_));
}

void Llama::synchronize() { must(cudaStreamSynchronize(stream_), "the GPU's work"); }

std::vector<double> Llama::time_decode(int repeat) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  std::vector<double> us;
  for (int i = -3; i < repeat; ++i) {
    must(cudaEventRecord(begin, stream_), "event");
    decode();
    must(cudaEventRecord(end, stream_), "event");
    synchronize();
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 0) us.push_back(1000.0 * ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return us;
}

}  // namespace kvq::bench
