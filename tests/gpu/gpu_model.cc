// Invariant: the oracle computes over copies of the pages in host memory, twice each where a page moved during a call.
#include "tests/gpu/gpu_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>

#include "client/abi.h"
#include "kernels/cuda/vmm.h"
#include "kernels/half.h"
#include "kvq/page_format.h"

namespace kvq::test {
namespace {

// What tensor cores make of it: probabilities and dequantized values are 16-bit there, values lie within (-2, 2).
constexpr double kOutError = 0.01, kLseError = 0.01;
constexpr std::size_t kMostChanged = 8;

ModelGeometry geometry() {
  ModelGeometry g;
  g.layers = kLayers;
  for (std::uint32_t i = 0; i < kLayers; ++i) g.layer[i] = {kKvHeads, kHeadDim, Dtype::fp16, 0};
  return g;
}

std::vector<std::uint16_t> random_halves(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> out(count);
  for (std::uint16_t& x : out) x = float_to_half(normal(random));
  return out;
}

// The pages of one call as they were before and after it, in host memory.
class Copies {
 public:
  Copies(GpuModel& gpu, const std::vector<std::uint64_t>& before, const std::vector<std::uint64_t>& after)
      : pages_(before.size()), entries_(2 * before.size() + 1) {
    for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts_[f] = make_layout(geometry_, static_cast<Format>(f));
    const std::uint64_t slot_bytes = layouts_[static_cast<std::size_t>(Format::dense)].page_bytes;
    bytes_.resize(entries_.size() * slot_bytes);
    entries_[0].store(pack_entry({0, Format::none, EntryState::null, 0}));
    for (std::size_t i = 0; i < pages_; ++i) {
      if (before[i] != after[i]) changed_.push_back(i);
      for (const std::uint64_t side : {0, 1}) {
        const std::uint64_t word = side == 0 ? before[i] : after[i];
        const std::size_t number = 2 * i + 1 + side;
        const std::vector<std::byte> page = gpu.page_bytes(word);
        std::memcpy(bytes_.data() + number * slot_bytes, page.data(), page.size());
        Entry entry = unpack_entry(word);
        entry.offset_bytes = number * slot_bytes;
        entries_[number].store(pack_entry(entry));
        if (side == 1 && entry.format != Format::dense) ++quantized_;
      }
    }
  }

  // Whether some mix of before and after gives this.
  bool explain(const Attention& attention, std::int32_t length, const std::vector<float>& out,
               const std::vector<float>& lse) const {
    if (changed_.size() > kMostChanged) throw std::runtime_error("more pages changed in one call than can be checked");
    for (std::uint32_t choice = 0; choice < (1u << changed_.size()); ++choice) {
      std::vector<std::int32_t> table(pages_);
      for (std::size_t i = 0; i < pages_; ++i) table[i] = static_cast<std::int32_t>(2 * i + 1);
      for (std::size_t c = 0; c < changed_.size(); ++c)
        table[changed_[c]] += static_cast<std::int32_t>(choice >> c & 1);
      if (matches(attention, table, length, out, lse)) return true;
    }
    return false;
  }
  std::size_t changed() const { return changed_.size(); }
  std::size_t quantized() const { return quantized_; }
  std::size_t pages() const { return pages_; }

 private:
  bool matches(const Attention& attention, const std::vector<std::int32_t>& table, std::int32_t length,
               const std::vector<float>& out, const std::vector<float>& lse) const {
    const std::int32_t starts[] = {0, 1};
    AttentionCall call{.model = {&geometry_, layouts_}, .layer = attention.layer(), .batch = 1};
    call.pages = {entries_.data(), static_cast<std::uint32_t>(entries_.size()), const_cast<std::byte*>(bytes_.data())};
    call.block_tables = table.data();
    call.block_table_stride = static_cast<std::int64_t>(table.size());
    call.lengths = &length;
    call.query_starts = starts;
    call.q = attention.query().data();
    call.q_token_stride = kQueryHeads * kHeadDim;
    call.q_head_stride = kHeadDim;
    call.query_heads = kQueryHeads;
    call.out_type = Real::fp32;
    const std::vector<oracle::Row> rows = oracle::attend(call);
    for (std::uint32_t head = 0; head < kQueryHeads; ++head) {
      if (!(std::fabs(lse[head] - rows[head].lse) <= kLseError)) return false;
      for (std::uint32_t c = 0; c < kHeadDim; ++c) {
        if (!(std::fabs(out[head * kHeadDim + c] - rows[head].out[c]) <= kOutError)) return false;
      }
    }
    return true;
  }

  const ModelGeometry geometry_ = geometry();
  PageLayout layouts_[kFormatCount];
  const std::size_t pages_;
  std::vector<DirectoryEntry> entries_;
  std::vector<std::byte> bytes_;
  std::vector<std::size_t> changed_;
  std::size_t quantized_ = 0;
};

}  // namespace

Attention::Attention(std::size_t pages, std::uint32_t layer, std::uint64_t seed)
    : query_(random_halves(seed, kQueryHeads * kHeadDim)),
      q_(query_),
      out_(query_.size()),
      lse_(kQueryHeads),
      table_(pages),
      length_(1),
      starts_(std::vector<std::int32_t>{0, 1}) {
  args_.size = sizeof(args_);
  args_.layer = layer;
  args_.batch = 1;
  args_.q = q_.data();
  args_.out = out_.data();
  args_.lse = lse_.data();
  args_.q_token_stride = args_.out_token_stride = kQueryHeads * kHeadDim;
  args_.q_head_stride = args_.out_head_stride = kHeadDim;
  args_.q_dtype = KVQ_FP16;
  args_.out_dtype = KVQ_FP32;
  args_.query_starts = starts_.data();
  args_.seq_lengths = length_.data();
  args_.block_table = table_.data();
  args_.block_table_stride = static_cast<std::int64_t>(pages);
  args_.query_heads = kQueryHeads;
  args_.window = -1;
}

void Attention::set(const std::vector<std::int32_t>& table, std::int32_t length, cudaStream_t stream) {
  table_.set(table, stream);
  length_.set({length}, stream);
  args_.stream = stream;
}

void GpuModel::append(Sequence& sequence, std::uint64_t first, const std::vector<std::uint32_t>& tokens,
                      cudaStream_t stream) {
  const OnGpu<std::int64_t> slots(sequence.slot_mapping(first, tokens.size()));
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    std::vector<std::uint16_t> k(tokens.size() * kHeadDim), v(k.size());
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::uint32_t c = 0; c < kHeadDim; ++c) {
        k[t * kHeadDim + c] = element(layer, false, first + t, tokens[t], c);
        v[t * kHeadDim + c] = element(layer, true, first + t, tokens[t], c);
      }
    }
    const OnGpu<std::uint16_t> k_on_gpu(k), v_on_gpu(v);
    kvq_append_args args{};
    args.size = sizeof(args);
    args.layer = layer;
    args.tokens = static_cast<std::uint32_t>(tokens.size());
    args.k = k_on_gpu.data();
    args.v = v_on_gpu.data();
    args.k_token_stride = args.v_token_stride = kHeadDim;
    args.k_head_stride = args.v_head_stride = kHeadDim;
    args.slots = slots.data();
    args.stream = stream;
    model().append(args);
    MUST(cudaStreamSynchronize(stream));  // before the arrays go
  }
}

std::uint64_t GpuModel::write(Sequence& sequence, std::uint64_t first, const std::vector<std::uint32_t>& tokens,
                              cudaStream_t stream) {
  sequence.reserve(tokens.size(), 10'000);
  Step step(model());
  append(sequence, first, tokens, stream);
  step.end(stream);
  sequence.commit(tokens, step.serial());
  return step.serial();
}

std::vector<std::uint64_t> GpuModel::entry_words(const std::vector<std::int32_t>& table) {
  const DirectoryEntry* entries = get()->model->memory().kernel_entries();
  std::vector<std::uint64_t> out(table.size());
  for (std::size_t i = 0; i < table.size(); ++i) {
    MUST(cudaMemcpy(&out[i], entries + table[i], sizeof(out[i]), cudaMemcpyDeviceToHost));
  }
  return out;
}

std::vector<std::byte> GpuModel::page_bytes(std::uint64_t entry_word) {
  const Entry entry = unpack_entry(entry_word);
  const bool readable = entry.state == EntryState::open || entry.state == EntryState::sealed;
  if (!readable) throw std::runtime_error("a page of the table is in state " + std::to_string(int(entry.state)));
  std::vector<std::byte> out(make_layout(geometry(), entry.format).page_bytes);
  MUST(cudaMemcpy(out.data(), get()->model->memory().arena() + entry.offset_bytes, out.size(), cudaMemcpyDeviceToHost));
  return out;
}

void GpuModel::check(const Attention& attention, const std::vector<std::int32_t>& table, std::int32_t length) {
  const std::vector<std::int32_t> seen(table.begin(), table.begin() + (length + KVQ_PAGE_TOKENS - 1) / KVQ_PAGE_TOKENS);
  const auto out = attention.out(), lse = attention.lse();
  const auto words = entry_words(seen);
  if (!Copies(*this, words, words).explain(attention, length, out, lse))
    throw std::runtime_error("attention differs from the oracle; fault status " + std::to_string(fault().status));
}

kvq::test::Seen GpuModel::attend_and_check(const std::vector<std::int32_t>& whole, std::int32_t length,
                                           std::uint32_t layer, std::uint64_t seed, std::uint32_t calls,
                                           cudaStream_t stream) {
  const std::vector<std::int32_t> table(whole.begin(),
                                        whole.begin() + (length + KVQ_PAGE_TOKENS - 1) / KVQ_PAGE_TOKENS);
  Attention attention(table.size(), layer, seed);
  attention.set(table, length, stream);
  kvq::test::Seen seen;
  for (; calls > 0; --calls) {
    Step step(model());
    const auto before = entry_words(table);
    model().attend(attention.args());
    const auto out = attention.out(), lse = attention.lse();
    const auto after = entry_words(table);
    const Copies copies(*this, before, after);
    if (!copies.explain(attention, length, out, lse)) {
      throw std::runtime_error("attention differs from the oracle; " + std::to_string(copies.changed()) +
                               " pages changed meanwhile, " + std::to_string(copies.quantized()) + " of " +
                               std::to_string(table.size()) + " are quantized, fault status " +
                               std::to_string(fault().status));
    }
    step.end(stream);
    ++seen.calls;
    if (copies.changed() == 0) ++seen.exact;
    const std::size_t quantized = copies.quantized();
    ++(quantized == 0 ? seen.dense : quantized < copies.pages() ? seen.mixed : seen.quantized);
  }
  return seen;
}

void expect(bool truth, const char* what) {
  if (!truth) throw std::runtime_error(std::string(what) + ": " + kvq_last_error());
}

void expect_lost(kvq_status status, const char* what) {
  expect(status == KVQ_ERR_CONTEXT_LOST, what);
  expect(std::string(kvq_last_error()).find("start the process anew") != std::string::npos, "text");
}

std::string gpu_settings(double quantize_at, const std::string& exporter) {
  const auto gpus = cuda::visible_gpus();
  if (!gpus) throw std::runtime_error(gpus.error().context);
  std::ostringstream out;
  out << "device = \"" << gpus->front().uuid
      << "\"\narena_bytes = \"32MiB\"\nslab_bytes = \"2MiB\"\nmax_pages = 4096\n"
      << "gpu_export = \"" << exporter << "\"\nresidual_window_pages = 0\n"
      << "quantize_at = " << quantize_at << "\nevict_at = 0.98\nrefuse_at = 0.99\nrelief = 0.01\n"
      << "log_level = \"debug\"\n";
  return out.str();
}

kvq_fault GpuModel::fault() {
  kvq_fault out{};
  out.size = sizeof(out);
  kvq::check(kvq_get_fault(get(), &out));
  return out;
}

}  // namespace kvq::test
