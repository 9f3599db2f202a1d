// What touches page bytes: append, attend and copies, handed to the host kernels.
//
// Invariant: page bytes are read and written only while a step of this session is open, so that no place is reused
// meanwhile.
#include <algorithm>
#include <chrono>
#include <thread>

#include "client/last_error.h"
#include "client/model.h"
#include "kvq/kill_point.h"

namespace kvq::client {
namespace {

constexpr std::uint32_t kSettleMs = 10'000;  // for steps that run on the GPU: far more than a forward pass takes

kvq_status needs_step(const char* call, const Steps& steps) {
  if (steps.open() != 0) return KVQ_OK;
  return fail(KVQ_ERR_INVALID_ARGUMENT, "%s outside a step: pages could be moved meanwhile; call kvq_step_begin first",
              call);
}

// Polls until `over`, sleeping a little longer each time; false: not in time.
template <typename Over>
bool poll(std::uint32_t ms, Over over) {
  const Deadline deadline(ms);
  for (auto pause = std::chrono::microseconds(10); !over();
       pause = std::min(2 * pause, std::chrono::microseconds(500))) {
    if (deadline.left_ms() == 0) return over();
    std::this_thread::sleep_for(pause);
  }
  return true;
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
  const AppendCall call{.model = view(),
                        .pages = pages(),
                        .layer = args.layer,
                        .dtype = geometry_.layer[args.layer].dtype,
                        .k = args.k,
                        .v = args.v,
                        .k_token_stride = args.k_token_stride,
                        .k_head_stride = args.k_head_stride,
                        .v_token_stride = args.v_token_stride,
                        .v_head_stride = args.v_head_stride,
                        .slots = args.slots,
                        .tokens = args.tokens};
  if (auto s = side_->append(call, args, aliases_); s != KVQ_OK) return s;
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
  AttentionCall call{.model = view(), .pages = pages(), .layer = args.layer, .batch = args.batch};
  call.block_tables = args.block_table;
  call.block_table_stride = args.block_table_stride;
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
  kvq_attend_args used = args;
  if (used.workspace == nullptr) used.workspace_bytes = workspace_bytes_;
  return side_->attend(call, used, aliases_);
}

kvq_status Model::merge(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint64_t rows,
                        std::uint32_t head_dim, void* stream) {
  if (auto s = check_data("kvq_merge_states_on"); s != KVQ_OK) return s;
  return side_->merge(out_a, lse_a, out_b, lse_b, rows, head_dim, stream);
}

kvq_status Model::workspace_bytes(std::size_t& bytes) {
  if (auto s = check_data("kvq_attend_workspace_bytes"); s != KVQ_OK) return s;
  bytes = 0;
  for (const std::uint16_t heads : query_heads_) {
    std::size_t wanted = 0;
    if (auto s = side_->workspace_bytes(view(), heads, wanted); s != KVQ_OK) return s;
    bytes = std::max(bytes, wanted);
  }
  return KVQ_OK;
}

kvq_status Model::begin_step(std::uint64_t& step) {
  if (auto s = check_data("kvq_step_begin"); s != KVQ_OK) return s;
  if (auto s = check_session(); s != KVQ_OK) return s;
  if (auto s = side_->check_context(); s != KVQ_OK) return s;
  return steps_.begin(step);
}

// Waits for what still runs on the GPU; when its context is lost, nothing does.
kvq_status Model::settle_running(const char* call) {
  if (steps_.running() == 0) return KVQ_OK;
  if (side_->ask_context() != KVQ_OK) {
    steps_.end_lost();
    return KVQ_OK;
  }
  if (poll(kSettleMs, [this] { return steps_.running() == 0; })) return KVQ_OK;
  return fail(KVQ_ERR_LIMIT_REACHED, "%s: %u steps still run on the GPU after %u ms; synchronize their streams first",
              call, steps_.running(), kSettleMs);
}

kvq_status Model::set_aliases(const kvq_alias* aliases, std::size_t count, bool now, void* stream) {
  if (auto s = check_open(); s != KVQ_OK) return s;
  if (auto s = side_->check_context(); s != KVQ_OK) return s;
  if (now) {
    if (auto s = settle_running("kvq_set_aliases"); s != KVQ_OK) return s;
  }
  if (auto s = aliases_.set(aliases, count, memory().directory().capacity); s != KVQ_OK) return s;
  return now ? side_->show_aliases_now(aliases, count) : side_->show_aliases(aliases, count, stream);
}

// The step has ended on the device, not only been given to end_step.
kvq_status Model::wait_until_over(std::uint64_t step) {
  if (step == 0 || steps_.is_over(step) || !on_gpu()) return KVQ_OK;
  if (auto s = side_->ask_context(); s != KVQ_OK) return s;
  if (poll(steps_.is_open(step) ? 0 : kSettleMs, [this, step] { return steps_.is_over(step); })) return KVQ_OK;
  return fail(KVQ_ERR_INVALID_ARGUMENT,
              "a page that step %llu writes cannot be copied yet: the step is not over; end it first",
              static_cast<unsigned long long>(step));
}

kvq_status Model::copy_page(PageId from, PageId to, std::uint64_t written_in) {
  if (auto s = wait_until_over(written_in); s != KVQ_OK) return s;
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
  return side_->copy_page(view(), {from, layouts_[format], source.offset_bytes, dense, target.offset_bytes});
}

}  // namespace kvq::client
