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

inline const std::vector<Format> kAllFormats(std::begin(kFormats), std::end(kFormats));

// Shapes that every device must take.
inline Shape shape_of_heads(std::uint32_t d, Format format, Dtype dtype) {
  Shape shape;
  shape.d = d;
  shape.kv_heads = 2;
  shape.group = 3;
  shape.dtype = dtype;
  shape.q_type = dtype == Dtype::fp16 ? Real::fp16 : Real::bf16;
  shape.lengths = {192, 130};
  shape.queries = {1, 2};
  shape.formats = {format};
  return shape;
}
inline Shape shape_of_group(std::uint32_t group) {
  Shape shape;
  shape.d = group % 2 != 0 ? 64 : 128;
  shape.group = group;
  shape.dtype = group % 3 != 0 ? Dtype::bf16 : Dtype::fp16;
  shape.q_type = Real::bf16;
  shape.out_type = Real::bf16;
  shape.lengths = {200};
  shape.queries = {3};
  shape.formats = kAllFormats;
  return shape;
}
inline Shape shape_around_pages(std::uint32_t d, Real out) {
  Shape shape;
  shape.d = d;
  shape.kv_heads = 2;
  shape.group = 5;
  shape.q_type = Real::fp32;
  shape.out_type = out;
  shape.lengths = {0, 1, 63, 64, 65, 1003, 130, 7, 0};
  shape.queries = {0, 1, 1, 2, 7, 1, 130, 0, 2};  // the last: padding rows that see nothing
  shape.formats = kAllFormats;
  shape.null_pages = true;
  return shape;
}

// An element of an output array.
inline double real_at(const void* data, Real type, std::size_t at) {
  if (type == Real::fp32) return static_cast<const float*>(data)[at];
  return oracle::decode_element(static_cast<const std::uint16_t*>(data)[at],
                                type == Real::fp16 ? Dtype::fp16 : Dtype::bf16);
}

struct Bounds {
  double output, lse;
};

// Compares a row, `output(channel)` and `lse`, with the oracle's. `worst` grows to the largest share of its bound that
// was used. False: a failure was added.
template <typename Output>
bool check_row(const std::string& what, std::size_t r, const oracle::Row& row, Real type, const Bounds& bounds,
               const Output& output, float lse, double& worst) {
  const double unit = type == Real::fp16 ? 0x1p-11 : type == Real::bf16 ? 0x1p-8 : 0x1p-23;
  for (std::uint32_t c = 0; c < row.out.size(); ++c) {
    const double got = output(c), error = std::fabs(got - row.out[c]) - unit * std::fabs(row.out[c]);
    worst = std::max(worst, error / bounds.output);
    if (error <= bounds.output) continue;  // false for NaN
    ADD_FAILURE() << what << " row " << r << " channel " << c << ": " << got << " for " << row.out[c] << ", bound "
                  << bounds.output;
    return false;
  }
  const bool empty = std::isinf(row.lse) && row.lse < 0;
  if (empty ? lse == row.lse : std::fabs(lse - row.lse) <= bounds.lse) return true;
  ADD_FAILURE() << what << " row " << r << ": lse " << lse << " for " << row.lse;
  return false;
}

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
  double check(const std::vector<oracle::Row>& expected, const std::string& what) {
    std::fill(out_.begin(), out_.end(), 0xff);  // NaN in all three types
    std::fill(lse_.begin(), lse_.end(), std::numeric_limits<float>::quiet_NaN());
    const Result<void> done = attend(call_);
    EXPECT_TRUE(done) << done.error().context;
    if (!done) return 0;
    double worst = 0;
    for (std::size_t r = 0; r < expected.size(); ++r) {
      const oracle::Row& row = expected[r];
      const Bounds bounds{output_bound(row), row.logit_error + 0x1p-16 + 0x1p-21 * std::fabs(row.lse)};
      if (!check_row(
              what, r, row, shape_.out_type, bounds, [&](std::uint32_t c) { return output(r, c); }, lse_[r], worst))
        break;
    }
    return worst;
  }

  double output(std::size_t row, std::uint32_t c) const {
    const std::size_t token = row / call_.query_heads, head = row % call_.query_heads;
    const std::size_t at = token * call_.out_token_stride + head * call_.out_head_stride + c;
    return real_at(out_.data(), shape_.out_type, at);
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

// Layers of different shape, and one query token after 180 on the pages 3, 1, 2 of a pool of this geometry.
struct LayersProblem {
  static ModelGeometry geometry() {
    ModelGeometry g;
    g.layers = 3;
    g.layer[0] = {2, 128, Dtype::bf16, 1};  // stays dense in a page of any format
    g.layer[1] = {1, 64, Dtype::fp16, 0};
    g.layer[2] = {3, 96, Dtype::fp16, 0};
    return g;
  }
  explicit LayersProblem(std::mt19937_64& random) : q(6 * 128), out(6 * 128) {
    for (float& x : q) x = std::normal_distribution<float>()(random);
  }
  AttentionCall call(PagePool& pool, std::uint32_t layer) {
    AttentionCall call;
    call.model = pool.model();
    call.pages = pool.source();
    call.layer = layer;
    call.batch = 1;
    call.block_tables = table;
    call.block_table_stride = 3;
    call.lengths = &length;
    call.query_starts = starts;
    call.q = q.data();
    call.q_type = call.out_type = Real::fp32;
    call.query_heads = 2u * g.layer[layer].kv_heads;
    call.q_head_stride = call.out_head_stride = g.layer[layer].head_dim;
    call.out = out.data();
    return call;
  }

  const ModelGeometry g = geometry();
  const std::int32_t table[3] = {3, 1, 2}, length = 180, starts[2] = {0, 1};
  std::vector<float> q, out;
};

}  // namespace kvq
