// The vector code stays inside its blocks: each buffer ends at a page that may not be touched.
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "attend_fixture.h"

namespace kvq {
namespace {

// `size` bytes that end where the mapping ends; the next byte is a fault.
class Guarded {
 public:
  explicit Guarded(std::size_t size) {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = round_up(size, page) + page;
    void* p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) std::abort();
    base_ = static_cast<std::byte*>(p);
    data = base_ + mapped_ - page - size;
    if (mprotect(base_ + mapped_ - page, page, PROT_NONE) != 0) std::abort();
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded&) = delete;
  std::byte* data;

 private:
  std::byte* base_;
  std::size_t mapped_;
};

TEST(Bounds, TranscodeStaysInsideItsBlocks) {
  for (const std::uint32_t d : kHeadDims) {
    for (const Format f : {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4}) {
      Guarded dense(block_bytes(Format::dense, d)), block(block_bytes(f, d));
      for (const std::int64_t target : vector_targets()) {
        WithTarget use(target);
        ASSERT_TRUE(quantize_block(f, d, Dtype::fp16, dense.data, block.data));
        dequantize_block(f, d, Dtype::fp16, block.data, dense.data);
      }
    }
  }
}

TEST(Bounds, AttendStaysInsideItsPagesQueriesAndOutputs) {
  std::mt19937_64 random(test_seed());
  for (const std::uint32_t d : kHeadDims) {
    for (const Format f : kFormats) {
      const ModelGeometry g = one_layer(1, d, Dtype::bf16);
      PagePool pool(g, 2, 1 << 20);
      pool.fill(1, f, random);
      const std::uint64_t block = block_bytes(f, d);
      Guarded page(block), q(2 * 3 * d), out(2 * 3 * d), lse(4 * 3);
      std::memcpy(page.data, pool.source().arena, block);
      // The entry's unit is 256 bytes: the arena begins where the block does.
      DirectoryEntry entries[2] = {pack_entry({0, Format::none, EntryState::null, 0}),
                                   pack_entry({1, f, EntryState::sealed, 0})};
      const std::int32_t table = 1, length = 64, starts[2] = {0, 1};
      AttentionCall call;
      call.model = pool.model();
      call.pages = {entries, 2, page.data};
      call.batch = 1;
      call.block_tables = &table;
      call.block_table_stride = 1;
      call.lengths = &length;
      call.query_starts = starts;
      call.query_heads = 3;
      call.q = q.data;
      call.out = out.data;
      call.q_type = call.out_type = Real::bf16;
      call.q_head_stride = call.out_head_stride = d;
      call.lse = reinterpret_cast<float*>(lse.data);
      for (const std::int64_t target : vector_targets()) {
        WithTarget use(target);
        ASSERT_TRUE(attend(call));
        EXPECT_NEAR(call.lse[0], std::log(64.0), 1e-5);  // zero queries: all keys weigh the same
      }
    }
  }
}

}  // namespace
}  // namespace kvq
