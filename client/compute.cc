// What touches page bytes: append, attend and copies, handed to the host kernels.
//
// Invariant: page bytes are read and written only while a step of this session is open, so that no place is reused
// meanwhile.
#include <sched.h>

#include <algorithm>
#include <vector>

#include "client/last_error.h"
#include "client/model.h"
#include "kvq/kill_point.h"

namespace kvq::client {
namespace {

constexpr std::int64_t kTokensPerPage = KVQ_PAGE_TOKENS;

kvq_status in_layer(const char* call, std::uint32_t layer, const Error& error) {
  return fail(static_cast<kvq_status>(error.code), "%s, layer %u: %s", call, layer, error.context);
}

int cpus() {
  cpu_set_t set;
  const int count = ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::clamp(count, 1, kMaxThreads);
}

kvq_status needs_step(const char* call, const Steps& steps) {
  if (steps.open() != 0) return KVQ_OK;
  return fail(KVQ_ERR_INVALID_ARGUMENT, "%s outside a step: pages could be moved meanwhile; call kvq_step_begin first",
              call);
}

std::int64_t pages_of(std::int32_t tokens) { return (std::max(tokens, 0) + kTokensPerPage - 1) / kTokensPerPage; }

// The block tables of a call with aliases as page ids, rows of `stride` entries, in this thread's scratch memory.
kvq_status translate_tables(const kvq_attend_args& args, const Aliases& aliases, std::vector<std::int32_t>& out,
                            std::int64_t& stride) {
  if (args.batch != 0 && (args.block_table == nullptr || args.seq_lengths == nullptr)) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_attend, layer %u: block_table or seq_lengths is NULL", args.layer);
  }
  stride = 0;
  for (std::uint32_t b = 0; b < args.batch; ++b) stride = std::max(stride, pages_of(args.seq_lengths[b]));
  if (stride > args.block_table_stride && args.batch > 1) {
    return fail(KVQ_ERR_INVALID_ARGUMENT,
                "kvq_attend, layer %u: a sequence needs %lld pages, block_table_stride is %lld", args.layer,
                static_cast<long long>(stride), static_cast<long long>(args.block_table_stride));
  }
  out.resize(static_cast<std::size_t>(args.batch) * static_cast<std::size_t>(stride));
  for (std::uint32_t b = 0; b < args.batch; ++b) {
    aliases.translate_row(args.block_table + b * args.block_table_stride,
                          static_cast<std::size_t>(pages_of(args.seq_lengths[b])), out.data() + b * stride);
  }
  return KVQ_OK;
}

}  // namespace

kvq_status Model::append(const kvq_append_args& args) {
  if (auto s = check_data("kvq_append"); s != KVQ_OK) return s;
  if (auto s = needs_step("kvq_append", steps_); s != KVQ_OK) return s;
  if (args.layer >= geometry_.layers) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_append: layer %u, the model has %u", args.layer, geometry_.layers);
  }
  if (args.tokens == 0) return KVQ_OK;
  if (args.slots == nullptr) return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_append, layer %u: slots is NULL", args.layer);
  const std::int64_t* slots = args.slots;
  thread_local std::vector<std::int64_t> translated;
  if (args.slots_are_aliases != 0) {
    translated.resize(args.tokens);
    aliases_.translate_slots(args.slots, args.tokens, translated.data());
    slots = translated.data();
  }
  const auto done = kvq::append({.model = view(),
                                 .pages = pages(),
                                 .layer = args.layer,
                                 .dtype = geometry_.layer[args.layer].dtype,
                                 .k = args.k,
                                 .v = args.v,
                                 .k_token_stride = args.k_token_stride,
                                 .k_head_stride = args.k_head_stride,
                                 .v_token_stride = args.v_token_stride,
                                 .v_head_stride = args.v_head_stride,
                                 .slots = slots,
                                 .tokens = args.tokens});
  if (!done) return in_layer("kvq_append", args.layer, done.error());
  kill_point(KillPoint::client_page_written);
  return KVQ_OK;
}

kvq_status Model::attend(const kvq_attend_args& args) {
  if (auto s = check_data("kvq_attend"); s != KVQ_OK) return s;
  if (auto s = needs_step("kvq_attend", steps_); s != KVQ_OK) return s;
  if (args.layer >= geometry_.layers) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_attend: layer %u, the model has %u", args.layer, geometry_.layers);
  }
  if (args.query_heads != query_heads_[args.layer]) {
    return fail(KVQ_ERR_WRONG_LAYOUT, "kvq_attend, layer %u: query_heads %u, registered were %u", args.layer,
                args.query_heads, query_heads_[args.layer]);
  }
  if (args.non_causal != 0) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_attend: non_causal is %u; only causal attention is supported",
                args.non_causal);
  }
  if (args.q_dtype > KVQ_FP32 || args.out_dtype > KVQ_FP32) {
    return fail(KVQ_ERR_WRONG_LAYOUT, "kvq_attend: q_dtype %u or out_dtype %u is none of fp16 (0), bf16 (1), fp32 (2)",
                args.q_dtype, args.out_dtype);
  }
  const std::int32_t* tables = args.block_table;
  std::int64_t stride = args.block_table_stride;
  thread_local std::vector<std::int32_t> translated;
  if (args.table_has_aliases != 0) {
    if (auto s = translate_tables(args, aliases_, translated, stride); s != KVQ_OK) return s;
    tables = translated.data();
  }
  AttentionCall call{.model = view(), .pages = pages(), .layer = args.layer, .batch = args.batch};
  call.block_tables = tables;
  call.block_table_stride = stride;
  call.lengths = args.seq_lengths;
  call.query_starts = args.query_starts;
  call.q = args.q;
  call.q_type = static_cast<Real>(args.q_dtype);
  call.q_token_stride = args.q_token_stride;
  call.q_head_stride = args.q_head_stride;
  call.query_heads = args.query_heads;
  call.out = args.out;
  call.out_type = static_cast<Real>(args.out_dtype);
  call.out_token_stride = args.out_token_stride;
  call.out_head_stride = args.out_head_stride;
  call.lse = args.lse;
  call.scale = args.scale;
  call.window = args.window;
  call.softcap = args.soft_cap;
  call.alibi = args.alibi_slopes;
  call.sinks = args.sinks;
  call.threads = args.threads == 0 ? cpus() : static_cast<int>(std::min<std::uint32_t>(args.threads, kMaxThreads));
  const auto done = kvq::attend(call);
  return done ? KVQ_OK : in_layer("kvq_attend", args.layer, done.error());
}

kvq_status Model::copy_page(PageId from, PageId to) {
  const InternalStep step(steps_);
  if (step.status() != KVQ_OK) return step.status();
  const Entry source = entry(from), target = entry(to);
  if (source.state != EntryState::open && source.state != EntryState::sealed) {
    return fail(KVQ_ERR_LOST_PAGE, "page %u cannot be copied: its content is not on the device", raw(from));
  }
  if (target.state != EntryState::open) return fail(KVQ_ERR_STALE_ID, "page %u, a credit, is not open", raw(to));
  const auto format = static_cast<std::size_t>(source.format);
  if (format == 0 || format >= kFormatCount) {
    return fail(KVQ_ERR_WRONG_LAYOUT, "page %u has format %zu, unknown to this libkvq", raw(from), format);
  }
  const PageLayout& dense = layouts_[static_cast<std::size_t>(Format::dense)];
  std::byte* base = memory().arena();
  const auto done =
      transcode_page(geometry_, layouts_[format], base + source.offset_bytes, dense, base + target.offset_bytes);
  return done
             ? KVQ_OK
             : fail(static_cast<kvq_status>(done.error().code), "copying page %u: %s", raw(from), done.error().context);
}

}  // namespace kvq::client
