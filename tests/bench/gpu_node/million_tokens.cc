// One sequence of a million tokens on one GPU: built through append, seal and pressure, then read by attention.
//
// Invariant: what sampled layers give is compared with the values that were appended (which no page holds any more),
// and of each a head with the double-precision oracle over the very bytes of its pages.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <thread>

#include "client/abi.h"
#include "kernels/half.h"
#include "kernels/oracle.h"
#include "tests/bench/gpu_node/llama.h"
#include "tests/bench/gpu_node/node.h"
#include "tests/bench/gpu_node/reference.h"
#include "tests/bench/gpu_node/topics.h"

namespace kvq::bench {
namespace {

constexpr std::uint64_t kWeightBytes = 16'000'000'000;

// The pages of one head of one layer, copied to the host as pages of a model that has nothing else.
struct HeadPages {
  ModelGeometry geometry;
  PageLayout layouts[kFormatCount];
  std::vector<std::byte> bytes;
  std::vector<DirectoryEntry> entries;
  std::vector<std::int32_t> table;
  std::uint64_t highest_bytes = 0;  // largest place in the arena that was read
};

void copy_head(const client::Model& model, const std::vector<std::int32_t>& pages, std::uint32_t layer,
               std::uint32_t head, HeadPages& out) {
  out.geometry.layers = 1;
  out.geometry.layer[0] = {1, kHeadDim, Dtype::fp16, 0};
  for (std::uint32_t f = 1; f < kFormatCount; ++f) {
    out.layouts[f] = make_layout(out.geometry, static_cast<Format>(f));
  }
  out.entries = std::vector<DirectoryEntry>(pages.size() + 1);
  std::uint64_t at = 0;
  std::vector<std::uint64_t> sources;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const Entry e = model.entry(PageId{static_cast<std::uint32_t>(pages[i])});
    const PageLayout whole = make_layout(model.geometry(), e.format);
    sources.push_back(e.offset_bytes + whole.layer[layer].offset_bytes + head * whole.layer[layer].head_bytes);
    out.highest_bytes = std::max(out.highest_bytes, sources.back());
    out.entries[i + 1].store(pack_entry({1, e.format, EntryState::sealed, at}));
    out.table.push_back(static_cast<std::int32_t>(i + 1));
    at += out.layouts[static_cast<std::size_t>(e.format)].page_bytes;
  }
  out.bytes.resize(at);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const Entry e = unpack_entry(out.entries[i + 1].load());
    must(cudaMemcpyAsync(out.bytes.data() + e.offset_bytes, model.memory().arena() + sources[i],
                         block_bytes(e.format, kHeadDim), cudaMemcpyDeviceToHost, nullptr),
         "copy of a page");
  }
  must(cudaDeviceSynchronize(), "copies of pages");
}

// Largest distance of `got` from the oracle over the head's own pages, relative to the norm of the row.
double oracle_error(HeadPages& head, const Llama& llama, std::uint32_t kv_head, std::int32_t length,
                    const std::vector<float>& got) {
  constexpr std::uint32_t group = kQueryHeads / kKvHeads;
  AttentionCall call{
      .model = {&head.geometry, head.layouts},
      .pages = {head.entries.data(), static_cast<std::uint32_t>(head.entries.size()), head.bytes.data()}};
  const std::int32_t starts[2] = {0, 1};
  call.batch = 1;
  call.block_tables = head.table.data();
  call.block_table_stride = static_cast<std::int64_t>(head.table.size());
  call.lengths = &length;
  call.query_starts = starts;
  call.q = llama.queries().data() + kv_head * group * kHeadDim;
  call.q_head_stride = kHeadDim;
  call.q_token_stride = group * kHeadDim;
  call.query_heads = group;
  const std::vector<oracle::Row> rows = oracle::attend(call);
  double worst = 0;
  for (std::uint32_t h = 0; h < group; ++h) {
    double error = 0, norm = 0;
    for (std::uint32_t c = 0; c < kHeadDim; ++c) {
      const double is = got[(kv_head * group + h) * kHeadDim + c], wanted = rows[h].out[c];
      error += (is - wanted) * (is - wanted);
      norm += wanted * wanted;
    }
    worst = std::max(worst, std::sqrt(error / norm));
  }
  return worst;
}

void build(Llama& llama, Sequence& sequence, std::uint64_t tokens) {
  constexpr std::uint64_t kPiece = 65536;
  const auto began = std::chrono::steady_clock::now();
  for (std::uint64_t at = 0; at < tokens; at += kPiece) {
    llama.grow(sequence, at, std::min(kPiece, tokens - at));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::cerr << "  " << at + std::min(kPiece, tokens - at) << " tokens after " << took.count() << " s" << std::endl;
  }
}

// Until nothing is quantized and no slab emptied any more: so many looks alike.
kvq_sequence_info settle(Node& node, const Sequence& sequence) {
  constexpr int kAlike = 8;
  node.ask("quantize --idle 0");
  std::uint64_t quantized = 0, slabs = 0;
  for (int i = 0, alike = 0; i < 200 && alike < kAlike; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const auto status = node.ask("status");
    const std::uint64_t quantized_now = sequence.info().quantized_pages;
    const std::uint64_t slabs_now = status["arena"]["slabs_used"];
    const bool same = quantized_now == quantized && slabs_now == slabs && status["transcodes"]["in_flight"] == 0;
    alike = same ? alike + 1 : 0;
    quantized = quantized_now, slabs = slabs_now;
  }
  return sequence.info();
}

}  // namespace

void million_tokens(Rows& rows, const Arguments& arguments) {
  const std::uint64_t tokens = arguments.number("tokens", 1'048'576);
  const std::string shape = "1x" + std::to_string(tokens);
  const DeviceBytes weights(arguments.number("weights", kWeightBytes));
  Node node({.arena_bytes = arguments.text("arena", "44GiB"),
             .quantize_at = 0.5,
             .evict_at = 0.96,
             .refuse_at = 0.98,
             .relief = 0.05});
  Llama llama(node.socket(), 1);
  Sequence sequence = llama.open(0);
  const auto began = std::chrono::steady_clock::now();
  build(llama, sequence, tokens);
  check(kvq_credits_return(llama.model(), 4096));  // the prefill is over
  const kvq_sequence_info info = settle(node, sequence);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  rows.value("build_s", shape, took.count(), "s");
  rows.value("pages_dense", shape, static_cast<double>(info.dense_pages), "pages");
  rows.value("pages_int4", shape, static_cast<double>(info.quantized_pages), "pages");
  const auto status = node.ask("status");
  const double slab_bytes = status["tenants"][0]["slab_bytes"];
  const double dense_bytes = static_cast<double>(info.pages) * kDensePageBytes;
  rows.value("slab_bytes", shape, slab_bytes, "bytes");
  rows.value("fp16_bytes", shape, dense_bytes, "bytes");
  rows.value("slab_bytes_of_fp16", shape, slab_bytes / dense_bytes, "ratio");

  llama.set_batch({&sequence}, {static_cast<std::int32_t>(tokens)});
  const std::vector<double> us = llama.time_decode(21);
  const double read_bytes =
      static_cast<double>(info.quantized_pages) * kLayers * kKvHeads * block_bytes(Format::int4, kHeadDim) +
      static_cast<double>(info.dense_pages) * kDensePageBytes;
  rows.times("kvq_int4_32_layers", shape, us, {{"bytes", read_bytes}, {"tb_s", read_bytes / quantile(us, 0.5) / 1e6}});

  const client::Model& inner = *llama.model()->model;
  const std::vector<std::int32_t> pages = sequence.block_table();
  double worst = 0, worst_appended = 0;
  std::uint64_t highest = 0;
  for (const auto& [layer, head] : {std::pair{0u, 0u}, {7u, 3u}, {15u, 5u}, {31u, 7u}}) {
    HeadPages copied;
    copy_head(inner, pages, layer, head, copied);
    std::vector<float> got(kQueryHeads * kHeadDim);
    must(cudaMemcpy(got.data(), llama.out(layer), got.size() * 4, cudaMemcpyDeviceToHost), "result");
    const double error = oracle_error(copied, llama, head, static_cast<std::int32_t>(tokens), got);
    highest = std::max(highest, copied.highest_bytes);
    worst = std::max(worst, error);
    const double appended = row_error(got.data(), reference(1, layer, tokens, llama.queries().data()));
    worst_appended = std::max(worst_appended, appended);
    std::cerr << "  layer " << layer << ": head " << head << " is off by " << error
              << ", all heads from what was appended by " << appended << std::endl;
  }
  rows.value("oracle_relative_error", shape, worst, "ratio");
  rows.value("appended_relative_error", shape, worst_appended, "ratio");
  rows.value("highest_place_read", shape, static_cast<double>(highest), "bytes");
  kvq_fault fault{};
  fault.size = sizeof fault;
  check(kvq_get_fault(llama.model(), &fault));
  rows.value("faults", shape, fault.status == KVQ_OK ? 0 : 1, "faults");
  if (!(worst < kTolerance && worst_appended < kTolerance) || fault.status != KVQ_OK)
    throw std::runtime_error("attention differs from the oracle");
}

}  // namespace kvq::bench
