// Attention by definition, one row at a time, in double.
//
// Invariant: as in oracle.h. The error budget of a logit is that of the stored formats' integer operands plus fp32 sums
// (kernels/attend_simd.cc explains the terms).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "kernels/oracle.h"

namespace kvq::oracle {
namespace {

struct Page {
  Block block;
  std::vector<double>
      step;          // per channel: half a step of an integer operand costs this much times |q|'s largest product
  double codes = 0;  // largest |code - top / 2|
};

double query_element(const AttentionCall& call, std::int64_t at) {
  if (call.q_type == Real::fp32) return static_cast<const float*>(call.q)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(call.q)[at];
  return decode_element(bits, call.q_type == Real::fp16 ? Dtype::fp16 : Dtype::bf16);
}

Page load_page(const AttentionCall& call, std::int32_t id, std::uint32_t kv_head) {
  const LayerSpec& spec = call.model.geometry->layer[call.layer];
  const std::uint32_t d = spec.head_dim;
  Page page{{std::vector<double>(64 * d), std::vector<double>(64 * d)}, std::vector<double>(d), 0};
  if (id == 0) return page;
  const Entry entry = unpack_entry(call.pages.entries[id].load());
  if (entry.state == EntryState::null) return page;
  const LayerPlace& place = call.model.layouts[static_cast<std::uint32_t>(entry.format)].layer[call.layer];
  const std::byte* block = call.pages.arena + entry.offset_bytes + place.offset_bytes + kv_head * place.head_bytes;
  page.block = read_block(place.format, d, spec.dtype, block);
  if (place.format == Format::dense) return page;
  page.codes = place.format == Format::k8v4 ? 127.5 : 7.5;
  const BlockOffsets at = block_offsets(place.format, d);
  for (std::uint32_t c = 0; c < d; ++c) {
    std::uint16_t bits;
    std::memcpy(&bits, block + at.k_scale + 2 * scale_index(c, d), 2);
    page.step[c] = decode_element(bits, Dtype::fp16);
  }
  return page;
}

struct Sums {
  double maximum = -std::numeric_limits<double>::infinity(), sum = 0;
  std::vector<double> out;
  void add(double logit, const double* value) {
    const double top = std::max(maximum, logit);
    const double keep = std::exp(maximum - top), weight = std::exp(logit - top);
    if (top == -std::numeric_limits<double>::infinity()) return;
    maximum = top;
    sum = sum * keep + weight;
    for (std::size_t c = 0; c < out.size(); ++c) out[c] = out[c] * keep + (value != nullptr ? weight * value[c] : 0);
  }
};

Row attend_row(const AttentionCall& call, std::uint32_t sequence, std::int64_t token, std::uint32_t head,
               std::map<std::int64_t, Page>& pages) {
  const LayerSpec& spec = call.model.geometry->layer[call.layer];
  const std::uint32_t d = spec.head_dim, kv_head = head / (call.query_heads / spec.kv_heads);
  const std::int64_t first = call.query_starts[sequence], count = call.query_starts[sequence + 1] - first;
  const std::int64_t length = call.lengths[sequence], position = length - count + token;
  const double scale = call.scale != 0 ? call.scale : 1 / std::sqrt(double(d));
  std::vector<double> q(d);
  for (std::uint32_t c = 0; c < d; ++c) {
    q[c] = query_element(call, (first + token) * call.q_token_stride + head * call.q_head_stride + c);
  }
  Row row;
  Sums sums;
  sums.out.assign(d, 0);
  for (std::int64_t j = 0; j < length; ++j) {
    if (call.causal && j > position) break;
    if (call.window >= 0 && j <= position - call.window) continue;
    const std::int64_t key = (j / 64) * spec.kv_heads + kv_head;
    auto found = pages.find(key);
    if (found == pages.end()) {
      const std::int32_t id = call.block_tables[sequence * call.block_table_stride + j / 64];
      found = pages.emplace(key, load_page(call, id, kv_head)).first;
    }
    const Page& page = found->second;
    const double* k = page.block.k.data() + (j % 64) * d;
    const double* v = page.block.v.data() + (j % 64) * d;
    double logit = 0, magnitude = 0, largest = 0, squares = 0;
    for (std::uint32_t c = 0; c < d; ++c) {
      logit += q[c] * k[c];
      const double term = std::fabs(q[c]) * (std::fabs(k[c]) + page.codes * page.step[c]);
      magnitude += term;
      squares += term * term;
      largest = std::max(largest, std::fabs(q[c]) * page.step[c]);
      row.max_value = std::max(row.max_value, std::fabs(v[c]));
    }
    row.quantized |= page.codes != 0;
    row.spread = std::max(row.spread, std::fabs(scale) * std::sqrt(squares));
    logit *= scale;
    const double error = std::fabs(scale) * (largest / 32767 * page.codes * std::sqrt(double(d)) + magnitude * 0x1p-22);
    if (call.softcap > 0) logit = call.softcap * std::tanh(logit / call.softcap);
    if (call.alibi != nullptr) logit -= call.alibi[head] * std::fabs(double(position - j));
    row.logit_error = std::max(row.logit_error, error + std::fabs(logit) * 0x1p-22);
    sums.add(logit, v);
  }
  if (call.sinks != nullptr) sums.add(call.sinks[head], nullptr);
  row.out.assign(d, 0);
  row.lse = sums.maximum + std::log(sums.sum);  // -inf when nothing was added
  if (sums.sum != 0) {
    for (std::uint32_t c = 0; c < d; ++c) row.out[c] = sums.out[c] / sums.sum;
  }
  return row;
}

}  // namespace

std::vector<Row> attend(const AttentionCall& call) {
  std::vector<Row> rows;
  for (std::uint32_t s = 0; s < call.batch; ++s) {
    std::map<std::int64_t, Page> pages;
    for (std::int64_t token = 0; token < call.query_starts[s + 1] - call.query_starts[s]; ++token) {
      for (std::uint32_t head = 0; head < call.query_heads; ++head) {
        rows.push_back(attend_row(call, s, token, head, pages));
      }
    }
  }
  return rows;
}

}  // namespace kvq::oracle
