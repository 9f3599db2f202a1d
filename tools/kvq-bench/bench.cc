// One model of one layer; its pages are written, attended, quantized, attended again and released.
#include "tools/kvq-bench/bench.h"

#include <sched.h>

#include <cstring>
#include <memory>
#include <optional>
#include <random>

#include "client/abi.h"
#include "kvq/kvq.hpp"
#include "tools/kvq-bench/content.h"
#include "tools/kvq-bench/room.h"
#include "tools/kvq-bench/timing.h"
#include "tools/kvqctl/admin_client.h"

namespace kvq_bench {
namespace {

using kvqctl::AdminClient;
using kvqctl::Failure;

constexpr std::uint32_t kDeadlineMs = 10'000;
constexpr std::uint32_t kAttachPages = 8;
constexpr int kAskAgain = 20;  // ms
// Most that attention may differ; values are below 1. Of the formats, only 8-bit keys do not hold these keys exactly.
constexpr double kExactError = 1e-3, kRoundedError = 0.02;
constexpr int kShares = 8;  // of the time, one for each measurement

unsigned processors() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<unsigned>(CPU_COUNT(&set)) : 1;
}

kvq::Model make_model(kvq::Client& client) {
  const kvq_layer layer{kKvHeads, kHeadDim, KVQ_FP16, 0, kQueryHeads};
  kvq_model_desc desc{};
  desc.size = sizeof(desc);
  desc.layers = &layer;
  desc.layer_count = 1;
  desc.page_tokens = KVQ_PAGE_TOKENS;
  std::random_device random;  // nobody else's pages are found by this, nor these by anybody
  for (std::uint8_t& byte : desc.fingerprint) byte = static_cast<std::uint8_t>(random());
  desc.credits = 1;
  desc.device = "host";
  return {client, desc};
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options)
      : admin_(options.socket),
        share_s_(options.seconds / kShares),
        arena_bytes_(bytes_of_arena(host_of(status()))),
        client_(options.socket, "kvqctl bench"),
        model_(make_model(client_)),
        tenant_(model_.info().tenant_name),
        room_(room_of_tenant(host_of(status()), tenant_, arena_bytes_)),
        page_bytes_(model_.info().dense_page_bytes),
        content_(static_cast<std::uint32_t>(room_.bytes / page_bytes_) * KVQ_PAGE_TOKENS) {}

  Json run() {
    private_.size = sizeof(private_);
    private_.private_pages = 1;
    call();
    allocate();
    copies();
    {
      kvq::Sequence sequence = model_.open({}, nullptr, &private_);
      append(sequence);
      decode("decode_dense", sequence, page_bytes_, kExactError);
      quantize_and_decode(sequence);
    }
    attach();
    bool right = true;
    for (const Json& row : rows_)
      right = right && (row.at("error").is_null() || row.at("error") <= row.at("most_error"));
    return {{"version", kvq_version()}, {"device", "host"},
            {"tenant", tenant_},        {"kernel_target", kvq_kernel_target()},
            {"threads", threads_},      {"bytes", content_.tokens / KVQ_PAGE_TOKENS * page_bytes_},
            {"answers_right", right},   {"results", rows_},
            {"skipped", skipped_}};
  }

 private:
  Json status() { return document_ = Json::parse(admin_.status()); }

  Json& row(const char* name, double value, const char* unit, const char* what) {
    rows_.push_back({{"name", name},
                     {"value", value},
                     {"unit", unit},
                     {"what", what},
                     {"of_copy", nullptr},
                     {"tokens_per_s", nullptr},
                     {"error", nullptr},
                     {"most_error", nullptr}});
    return rows_.back();
  }
  Json& rate(const char* name, std::uint64_t bytes, double seconds, double copy_s, const char* what) {
    const double gb_per_s = static_cast<double>(bytes) / seconds / 1e9;
    Json& out = row(name, gb_per_s, "GB/s", what);
    const double of_copy = static_cast<double>(content_bytes());
    if (copy_s > 0) out["of_copy"] = gb_per_s / (of_copy / copy_s / 1e9);
    return out;
  }
  void skip(const char* name, const std::string& why) { skipped_.push_back({{"name", name}, {"why", why}}); }
  std::uint64_t content_bytes() const { return 2 * kRowBytes * content_.tokens; }

  // A question to kvqd and its answer.
  void call() {
    auto& session = model_.get()->model->session();
    const std::vector<double> all = rounds(share_s_, [&] { kvq::check(session.ping(kDeadlineMs)); });
    row("call", all[all.size() / 2] * 1e6, "us", "a call to kvqd and its answer, median");
    row("call_p99", all[all.size() * 99 / 100] * 1e6, "us", "the same, 99 of 100 are faster");
  }

  // Pages that are at hand with nobody: the daemon is asked for each lot.
  void allocate() {
    const std::uint32_t pages = std::min<std::uint32_t>(16, content_.tokens / KVQ_PAGE_TOKENS / 2);
    const double seconds = median_seconds(share_s_, [&] {
      kvq::Sequence sequence = model_.open({}, nullptr, &private_);
      sequence.reserve(pages * KVQ_PAGE_TOKENS, kDeadlineMs);
    });
    row("allocate", pages / seconds, "pages/s", "pages asked for and given back");
  }

  void copies() {
    copy_s_ = copy_seconds(content_bytes(), threads_, share_s_ / 2);
    copy_one_s_ = threads_ == 1 ? copy_s_ : copy_seconds(content_bytes(), 1, share_s_ / 2);
    rate("copy", content_bytes(), copy_s_, 0, "a plain copy by all threads, for comparison");
    rate("copy_one", content_bytes(), copy_one_s_, 0, "a plain copy by one thread");
  }

  void append(kvq::Sequence& sequence) {
    sequence.reserve(content_.tokens, kDeadlineMs);
    const std::vector<std::int64_t> slots = sequence.slot_mapping(0, content_.tokens);
    kvq_append_args args{};
    args.size = sizeof(args);
    args.tokens = content_.tokens;
    args.k = content_.k.data();
    args.v = content_.v.data();
    args.k_token_stride = args.v_token_stride = kKvHeads * kHeadDim;
    args.k_head_stride = args.v_head_stride = kHeadDim;
    args.slots = slots.data();
    const double seconds = median_seconds(share_s_, [&] {
      kvq::Step step(model_);
      model_.append(args);
    });
    rate("append", content_bytes(), seconds, copy_one_s_, "K and V written into pages, by one thread");
    const std::vector<std::uint32_t> tokens(content_.tokens, 1);
    sequence.commit(tokens);
  }

  // One query token over all pages.
  void decode(const char* name, kvq::Sequence& sequence, std::uint64_t page_bytes, double most_error) {
    const std::vector<std::int32_t> table = sequence.block_table();
    const std::int32_t starts[2] = {0, 1}, length = static_cast<std::int32_t>(content_.tokens);
    std::vector<float> out(kQueryHeads * kHeadDim);
    kvq_attend_args args{};
    args.size = sizeof(args);
    args.batch = 1;
    args.q = content_.q.data();
    args.out = out.data();
    args.q_token_stride = args.out_token_stride = kQueryHeads * kHeadDim;
    args.q_head_stride = args.out_head_stride = kHeadDim;
    args.q_dtype = args.out_dtype = KVQ_FP32;
    args.query_starts = starts;
    args.seq_lengths = &length;
    args.block_table = table.data();
    args.block_table_stride = static_cast<std::int64_t>(table.size());
    args.query_heads = kQueryHeads;
    args.window = -1;
    args.threads = threads_;
    const double seconds = median_seconds(share_s_, [&] {
      kvq::Step step(model_);
      model_.attend(args);
    });
    Json& made = rate(name, page_bytes * table.size(), seconds, copy_s_, "attention of one token over all pages");
    made["tokens_per_s"] = content_.tokens / seconds;
    made["error"] = worst_error(content_, out);
    made["most_error"] = most_error;
  }

  // What acts on the whole tenant is left out once somebody else is in it.
  bool alone() { return room_.alone && find_tenant(host_of(status()), tenant_)->at("sessions") == 1; }
  std::uint64_t sealed_pages() { return find_tenant(host_of(status()), tenant_)->at("sealed_pages"); }

  // All of the tenant's idle pages are quantized: only where these are all that it has.
  void quantize_and_decode(kvq::Sequence& sequence) {
    if (!alone()) {
      const std::string why = "tenant " + tenant_ + " has pages or sessions of others, which would be quantized, too";
      skip("quantize", why);
      return skip("decode_quantized", why);
    }
    sequence.park();
    const std::uint64_t pages = sequence.info().pages;
    const auto until_sealed = std::chrono::steady_clock::now();
    while (sealed_pages() < pages && seconds_since(until_sealed) < kDeadlineMs / 1e3) admin_.sleep_ms(1);
    const auto begin = std::chrono::steady_clock::now();
    std::uint64_t done = 0;
    double seconds = 0;
    for (int turn = 0; done < pages && seconds < kDeadlineMs / 1e3; ++turn) {
      if (turn % kAskAgain == 0) admin_.quantize(tenant_, 0, false);  // kvqd forgets those that found no slab in time
      admin_.sleep_ms(1);
      done = sequence.info().quantized_pages;
      seconds = seconds_since(begin);
    }
    sequence.resume(kDeadlineMs);
    if (done < pages) {
      const std::string why = std::to_string(done) + " of " + std::to_string(pages) + " pages were quantized in time";
      skip("quantize", why);
      return skip("decode_quantized", why);
    }
    rate("quantize", page_bytes_ * pages, seconds, copy_s_,
         "dense pages rewritten by kvqd, from asking for it to the last one");
    const bool rounds_keys = model_.info().cold_format == KVQ_FORMAT_K8V4;
    decode("decode_quantized", sequence, model_.info().cold_page_bytes, rounds_keys ? kRoundedError : kExactError);
  }

  // A prefix has to be cached for that, and dropped again.
  void attach() {
    if (!alone())
      return skip("attach", "tenant " + tenant_ + " has cached pages, of which kvqd would drop the others', too");
    try {
      admin_.evict(tenant_, 0, true);
    } catch (const Failure& failure) {
      return skip("attach", failure.what());
    }
    std::vector<std::uint32_t> tokens(kAttachPages * KVQ_PAGE_TOKENS);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint32_t>(i);
    {
      kvq::Sequence sequence = model_.open({});
      sequence.reserve(tokens.size(), kDeadlineMs);
      sequence.commit(tokens);
    }
    const auto begin = std::chrono::steady_clock::now();
    while (model_.lookup(tokens).cached_tokens < tokens.size() && seconds_since(begin) < kDeadlineMs / 1e3)
      admin_.sleep_ms(1);
    bool all = true;
    const double seconds = median_seconds(share_s_, [&] {
      std::uint64_t cached = 0;
      const kvq::Sequence sequence = model_.open(tokens, &cached);
      all = all && cached == tokens.size();
    });
    if (all) {
      row("attach", seconds * 1e6, "us", "a sequence opened on 8 cached pages, and released");
    } else {
      skip("attach", "the cached prefix went in between");
    }
    kvq::check(model_.get()->model->session().ping(kDeadlineMs));
    if (alone()) admin_.evict(tenant_, 0, false);
  }

  AdminClient admin_;
  Json document_;
  const double share_s_;
  const std::uint64_t arena_bytes_;
  kvq::Client client_;
  kvq::Model model_;
  const std::string tenant_;
  const TenantRoom room_;
  const std::uint64_t page_bytes_;
  const Content content_;
  const unsigned threads_ = processors();
  kvq_open_options private_{};
  double copy_s_ = 0, copy_one_s_ = 0;
  Json rows_ = Json::array(), skipped_ = Json::array();
};

// Memory of the tenant a while after the session has ended.
std::uint64_t left_bytes(const BenchOptions& options, const std::string& tenant, std::uint64_t before) {
  AdminClient admin(options.socket);
  std::uint64_t bytes = 0;
  const auto begin = std::chrono::steady_clock::now();
  do {
    admin.sleep_ms(50);
    const Json status = Json::parse(admin.status());
    const Json* found = find_tenant(host_of(status), tenant);
    bytes = found == nullptr ? 0 : found->at("slab_bytes").get<std::uint64_t>();
  } while (bytes > before && seconds_since(begin) < kDeadlineMs / 1e3);
  return bytes > before ? bytes - before : 0;
}

}  // namespace

Json run_bench(const BenchOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    const Json before = Json::parse(AdminClient(options.socket).status());
    Json report = Bench(options).run();
    const std::string tenant = report.at("tenant");
    const Json* found = find_tenant(host_of(before), tenant);
    report["left_bytes"] =
        left_bytes(options, tenant, found == nullptr ? 0 : found->at("slab_bytes").get<std::uint64_t>());
    report["seconds"] = seconds_since(begin);
    return report;
  } catch (const kvq::Failure& failure) {
    throw Failure(failure.status() == KVQ_ERR_NO_DAEMON || failure.status() == KVQ_ERR_DAEMON_GONE ? kvqctl::kNoDaemon
                                                                                                   : kvqctl::kRefused,
                  failure.what());
  }
}

}  // namespace kvq_bench
