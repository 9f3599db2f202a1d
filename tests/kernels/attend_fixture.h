// A random attention problem over a PagePool, run by the kernels and by the oracle.
//
// Invariant: outputs are poisoned with NaN before each run, unwritten page bytes are NaN, and unused table slots are
// -1, so reading or skipping too much shows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel_fixture.h"

namespace kvq {

inline constexpr double kValueError = 0x1p-13, kDenseError = 0x1p-20;

struct Shape {
  std::uint32_t d = 64, kv_heads = 1, group = 1;
  Dtype dtype = Dtype::fp16;
  Real q_type = Real::fp16, out_type = Real::fp32;
  std::vector<std::int32_t> lengths, queries;  // per sequence
  std::vector<Format> formats{Format::dense};  // drawn from, page by page
  bool null_pages = false;
};

// The bound that kernels/attend_simd.cc states, for fp32 output.
inline double output_bound(const oracle::Row& row) {
  return (std::expm1(2 * row.logit_error) + (row.quantized ? kValueError : kDenseError)) * row.max_value + 0x1p-24;
}

class Problem {
 public:
  Problem(const Shape& shape, std::mt19937_64& random)
      : shape_(shape),
        pool_(one_layer(static_cast<std::uint16_t>(shape.kv_heads), shape.d, shape.dtype), page_count(shape) + 1,
              (page_count(shape) + 1) * max_page_bytes(shape)) {
    make_pages(random);
    make_queries(random);
    call_.model = pool_.model();
    call_.pages = pool_.source();
    call_.batch = static_cast<std::uint32_t>(shape.lengths.size());
    call_.block_tables = tables_.data();
    call_.block_table_stride = stride_;
    call_.lengths = shape_.lengths.data();
    call_.query_starts = starts_.data();
    call_.query_heads = shape.kv_heads * shape.group;
    call_.q_type = shape.q_type;
    call_.out_type = shape.out_type;
    // Strides with gaps, and heads outermost for the outputs.
    call_.q_head_stride = shape.d + 8;
    call_.q_token_stride = call_.q_head_stride * call_.query_heads + 24;
    call_.out_token_stride = shape.d + 4;
    call_.out_head_stride = call_.out_token_stride * std::max(1, starts_.back());
    call_.q = queries_.data();
    out_.resize(std::size_t(call_.out_head_stride) * call_.query_heads * 4);
    lse_.resize(std::size_t(starts_.back()) * call_.query_heads);
    call_.out = out_.data();
    call_.lse = lse_.data();
  }

  AttentionCall& call() { return call_; }
  PagePool& pool() { return pool_; }
  std::vector<std::int32_t>& tables() { return tables_; }

  // Runs the kernels and compares every element with `expected`; returns the largest share of its bound that was used.
  double check(const std::vector<oracle::Row>& expected, const char* what) {
    std::fill(out_.begin(), out_.end(), 0xff);  // NaN in all three types
    std::fill(lse_.begin(), lse_.end(), std::numeric_limits<float>::quiet_NaN());
    const Result<void> done = attend(call_);
    EXPECT_TRUE(done) << done.error().context;
    if (!done) return 0;
    const double unit = shape_.out_type == Real::fp16 ? 0x1p-11 : shape_.out_type == Real::bf16 ? 0x1p-8 : 0x1p-23;
    double worst = 0;
    for (std::size_t r = 0; r < expected.size(); ++r) {
      const oracle::Row& row = expected[r];
      const double bound = output_bound(row);
      for (std::uint32_t c = 0; c < shape_.d; ++c) {
        const double got = output(r, c), error = std::fabs(got - row.out[c]) - unit * std::fabs(row.out[c]);
        worst = std::max(worst, error / bound);
        if (!(error <= bound)) {
          ADD_FAILURE() << what << " row " << r << " channel " << c << ": " << got << " for " << row.out[c]
                        << ", bound " << bound;
          return worst;
        }
      }
      const double lse_bound = row.logit_error + 0x1p-16 + 0x1p-21 * std::fabs(row.lse);
      const bool empty = std::isinf(row.lse) && row.lse < 0;
      if (empty ? lse_[r] != row.lse : !(std::fabs(lse_[r] - row.lse) <= lse_bound)) {
        ADD_FAILURE() << what << " row " << r << ": lse " << lse_[r] << " for " << row.lse;
        return worst;
      }
    }
    return worst;
  }

  double output(std::size_t row, std::uint32_t c) const {
    const std::size_t token = row / call_.query_heads, head = row % call_.query_heads;
    const std::size_t at = token * call_.out_token_stride + head * call_.out_head_stride + c;
    if (shape_.out_type == Real::fp32) return reinterpret_cast<const float*>(out_.data())[at];
    const auto bits = reinterpret_cast<const std::uint16_t*>(out_.data())[at];
    return oracle::decode_element(bits, shape_.out_type == Real::fp16 ? Dtype::fp16 : Dtype::bf16);
  }
  float lse(std::size_t row) const { return lse_[row]; }

 private:
  static std::uint32_t page_count(const Shape& s) {
    std::uint32_t pages = 0;
    for (const std::int32_t length : s.lengths) pages += (length + 63) / 64;
    return pages;
  }
  static std::uint64_t max_page_bytes(const Shape& s) {
    return round_up(block_bytes(Format::dense, s.d) * s.kv_heads, 256);
  }

  void make_pages(std::mt19937_64& random) {
    for (const std::int32_t length : shape_.lengths) stride_ = std::max<std::int64_t>(stride_, (length + 63) / 64 + 1);
    tables_.assign(stride_ * shape_.lengths.size(), -1);
    std::uint32_t id = 1;
    for (std::size_t s = 0; s < shape_.lengths.size(); ++s) {
      for (std::int32_t start = 0; start < shape_.lengths[s]; start += 64, ++id) {
        std::int32_t& slot = tables_[s * stride_ + start / 64];
        slot = shape_.null_pages && random() % 3 == 0 ? 0 : static_cast<std::int32_t>(id);
        const bool full = shape_.lengths[s] - start >= 64;
        pool_.fill(id, full ? shape_.formats[random() % shape_.formats.size()] : Format::dense, random);
        if (!full) poison_tail(id, shape_.lengths[s] - start);
      }
    }
  }

  void poison_tail(std::uint32_t id, std::uint32_t valid) {
    const Entry entry = unpack_entry(pool_.entry(id));
    pool_.entry(id) = pack_entry({1, Format::dense, EntryState::open, entry.offset_bytes});
    for (std::uint32_t part = 0; part < 2 * shape_.kv_heads; ++part) {
      auto* rows = reinterpret_cast<std::uint16_t*>(pool_.source().arena + entry.offset_bytes) + part * 64 * shape_.d;
      for (std::uint32_t t = valid; t < 64; ++t) std::fill_n(rows + t * shape_.d, shape_.d, 0xffff);
    }
  }

  void make_queries(std::mt19937_64& random) {
    starts_.assign(1, 0);
    for (const std::int32_t n : shape_.queries) starts_.push_back(starts_.back() + n);
    const std::size_t heads = shape_.kv_heads * shape_.group;
    queries_.resize(std::size_t(starts_.back() + 1) * ((shape_.d + 8) * heads + 24) * 4);
    std::normal_distribution<float> normal;
    const std::size_t elements = queries_.size() / (shape_.q_type == Real::fp32 ? 4 : 2);
    for (std::size_t i = 0; i < elements; ++i) {
      const float x = normal(random);
      if (shape_.q_type == Real::fp32) {
        reinterpret_cast<float*>(queries_.data())[i] = x;
      } else {
        const Dtype type = shape_.q_type == Real::fp16 ? Dtype::fp16 : Dtype::bf16;
        reinterpret_cast<std::uint16_t*>(queries_.data())[i] = encode(x, type);
      }
    }
  }

  Shape shape_;
  PagePool pool_;
  std::int64_t stride_ = 1;
  std::vector<std::int32_t> tables_, starts_;
  std::vector<std::uint8_t> queries_, out_;
  std::vector<float> lse_;
  AttentionCall call_;
};

}  // namespace kvq
