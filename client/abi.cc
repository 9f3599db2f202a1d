// kvq.h: library, connection, model, credits, steps, compute.
//
// Invariant: a function here checks its handle, sizes and pointers, and leaves the rest to the room.
#include "client/abi.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "client/lookup.h"
#include "kernels/host_kernels.h"

using namespace kvq::client;  // NOLINT: this file is the border of that namespace

namespace {

constexpr const char* kDefaultSocket = "/run/kvq/kvqd.sock";
constexpr std::uint32_t kConnectDeadlineMs = 5000;

static_assert(sizeof(kvq_pressure) == 40);  // its later fields lie where the first version had padding

std::string socket_path(const kvq_connect_options& options) {
  if (options.socket_path != nullptr) return options.socket_path;
  const char* from_environment = std::getenv("KVQ_SOCKET");
  return from_environment != nullptr && *from_environment != '\0' ? from_environment : kDefaultSocket;
}

std::string process_name() {
  std::ifstream file("/proc/self/comm");
  std::string name;
  std::getline(file, name);
  return name.empty() ? "kvq client" : name;
}

}  // namespace

extern "C" {

uint32_t kvq_abi_version(void) { return KVQ_ABI_VERSION; }
const char* kvq_version(void) { return KVQ_VERSION_TEXT; }
const char* kvq_status_name(kvq_status status) { return status_name(status); }
const char* kvq_last_error(void) { return last_error(); }
const char* kvq_kernel_target(void) { return kvq::best_target_name(); }

kvq_status kvq_connect(const kvq_connect_options* options, kvq_client** client) {
  return guarded("kvq_connect", [&] {
    if (client == nullptr) return missing("kvq_connect", "client");
    kvq_connect_options used{.size = sizeof(used)};
    if (options != nullptr) {
      if (auto s = check_size("kvq_connect", options); s != KVQ_OK) return s;
      used = *options;
    }
    install_fork_guard();
    auto made = std::make_unique<kvq_client>();
    const std::string label = used.label != nullptr ? used.label : process_name();
    const std::uint32_t deadline_ms = used.deadline_ms != 0 ? used.deadline_ms : kConnectDeadlineMs;
    if (auto s = Connection::open(socket_path(used), label, deadline_ms, made->connection); s != KVQ_OK) return s;
    *client = made.release();
    return KVQ_OK;
  });
}

kvq_status kvq_disconnect(kvq_client* client) {
  if (client == nullptr) return KVQ_OK;
  return call("kvq_disconnect", client, [](kvq_client& c) {
    if (const std::uint32_t models = c.models.load(std::memory_order_acquire); models != 0) {
      return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_disconnect: %u models are open; close them first", models);
    }
    delete &c;
    return KVQ_OK;
  });
}

kvq_status kvq_register_model(kvq_client* client, const kvq_model_desc* desc, kvq_model** model) {
  return call("kvq_register_model", client, [&](kvq_client& c) {
    if (auto s = check_size("kvq_register_model", desc); s != KVQ_OK) return s;
    if (model == nullptr) return missing("kvq_register_model", "model");
    auto made = std::make_unique<kvq_model>();
    if (auto s = Model::open(*c.connection, as_of_now(*desc), made->model); s != KVQ_OK) return s;
    made->client = &c;
    c.models.fetch_add(1, std::memory_order_acq_rel);
    *model = made.release();
    return KVQ_OK;
  });
}

kvq_status kvq_model_close(kvq_model* model) {
  if (model == nullptr) return KVQ_OK;
  return call("kvq_model_close", model, [](kvq_model& m) {
    if (auto s = m.model->close(); s != KVQ_OK) return s;
    m.client->models.fetch_sub(1, std::memory_order_acq_rel);
    delete &m;
    return KVQ_OK;
  });
}

kvq_status kvq_model_get_info(kvq_model* model, kvq_model_info* info) {
  return call("kvq_model_get_info", model, [&](kvq_model& m) {
    if (auto s = check_size("kvq_model_get_info", info); s != KVQ_OK) return s;
    kvq_model_info known{};
    m.model->get_info(known);
    known.size = info->size;
    std::memcpy(info, &known, std::min(known.size, sizeof(known)));
    return KVQ_OK;
  });
}

kvq_status kvq_lookup(kvq_model* model, const uint32_t* tokens, uint64_t token_count, const kvq_extra_key* extra_keys,
                      size_t extra_key_count, kvq_lookup_result* result) {
  return call("kvq_lookup", model, [&](kvq_model& m) {
    if (auto s = check_size("kvq_lookup", result); s != KVQ_OK) return s;
    if (tokens == nullptr && token_count != 0) return missing("kvq_lookup", "tokens");
    std::vector<ExtraKey> extra;
    if (auto s = read_extra_keys(extra_keys, extra_key_count, extra); s != KVQ_OK) return s;
    const CachedPrefix found = find_cached_prefix(*m.model, {tokens, token_count}, extra, false);
    result->cached_tokens = found.hits.size() * KVQ_PAGE_TOKENS;
    result->dense_tokens = found.dense_pages * KVQ_PAGE_TOKENS;
    result->quantized_tokens = found.quantized_pages * KVQ_PAGE_TOKENS;
    result->host_tokens = found.host_pages * KVQ_PAGE_TOKENS;
    result->pending = 0;  // open pages have no key yet: shared memory cannot tell
    return KVQ_OK;
  });
}

kvq_status kvq_credits_request(kvq_model* model, uint32_t pages, uint32_t deadline_ms) {
  return call("kvq_credits_request", model, [&](kvq_model& m) { return m.model->request_credits(pages, deadline_ms); });
}

kvq_status kvq_credits_return(kvq_model* model, uint32_t pages) {
  return call("kvq_credits_return", model, [&](kvq_model& m) { return m.model->return_credits(pages); });
}

kvq_status kvq_get_pressure(kvq_model* model, kvq_pressure* pressure) {
  return call("kvq_get_pressure", model, [&](kvq_model& m) {
    if (auto s = check_size("kvq_get_pressure", pressure); s != KVQ_OK) return s;
    return m.model->get_pressure(*pressure);
  });
}

kvq_status kvq_notice_fd(kvq_model* model, int* fd) {
  return call("kvq_notice_fd", model, [&](kvq_model& m) {
    if (fd == nullptr) return missing("kvq_notice_fd", "fd");
    *fd = m.model->notice_fd();
    return KVQ_OK;
  });
}

kvq_status kvq_lost_pages(kvq_model* model, uint64_t since, int32_t* pages, uint32_t* sequences, size_t capacity,
                          size_t* count, uint64_t* now) {
  return call("kvq_lost_pages", model, [&](kvq_model& m) {
    if (count == nullptr || now == nullptr) return missing("kvq_lost_pages", count == nullptr ? "count" : "now");
    if (capacity != 0 && (pages == nullptr || sequences == nullptr))
      return missing("kvq_lost_pages", "pages or sequences");
    LostPages lost;
    if (auto s = m.model->lost_pages(since, lost); s != KVQ_OK) return s;
    for (std::size_t i = 0; i < lost.pages.size() && i < capacity; ++i) {
      pages[i] = static_cast<std::int32_t>(lost.pages[i]);
      sequences[i] = i < lost.sequences.size() ? lost.sequences[i] : 0;
    }
    *count = lost.pages.size();
    *now = lost.now;
    return KVQ_OK;
  });
}

kvq_status kvq_step_begin(kvq_model* model, uint64_t* step) {
  return call("kvq_step_begin", model, [&](kvq_model& m) {
    if (step == nullptr) return missing("kvq_step_begin", "step");
    return m.model->begin_step(*step);
  });
}

kvq_status kvq_step_end(kvq_model* model, uint64_t step, void* stream) {
  return call("kvq_step_end", model, [&](kvq_model& m) { return m.model->end_step(step, stream); });
}

kvq_status kvq_append(kvq_model* model, const kvq_append_args* args) {
  return call("kvq_append", model, [&](kvq_model& m) {
    if (auto s = check_size("kvq_append", args); s != KVQ_OK) return s;
    return m.model->append(*args);
  });
}

kvq_status kvq_attend(kvq_model* model, const kvq_attend_args* args) {
  return call("kvq_attend", model, [&](kvq_model& m) {
    if (auto s = check_size("kvq_attend", args); s != KVQ_OK) return s;
    return m.model->attend(as_of_now(*args));
  });
}

kvq_status kvq_merge_states(float* out_a, float* lse_a, const float* out_b, const float* lse_b, uint64_t rows,
                            uint32_t head_dim) {
  return guarded("kvq_merge_states", [&] {
    if (rows == 0) return KVQ_OK;
    if (out_a == nullptr || lse_a == nullptr || out_b == nullptr || lse_b == nullptr)
      return missing("kvq_merge_states", "an array");
    if (rows > UINT32_MAX)
      return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_merge_states: %llu rows", static_cast<unsigned long long>(rows));
    kvq::merge_states(out_a, lse_a, out_b, lse_b, static_cast<std::uint32_t>(rows), head_dim);
    return KVQ_OK;
  });
}

kvq_status kvq_merge_states_on(kvq_model* model, float* out_a, float* lse_a, const float* out_b, const float* lse_b,
                               uint64_t rows, uint32_t head_dim, void* stream) {
  return call("kvq_merge_states_on", model, [&](kvq_model& m) {
    if (rows == 0) return KVQ_OK;
    if (out_a == nullptr || lse_a == nullptr || out_b == nullptr || lse_b == nullptr)
      return missing("kvq_merge_states_on", "an array");
    return m.model->merge(out_a, lse_a, out_b, lse_b, rows, head_dim, stream);
  });
}

kvq_status kvq_attend_workspace_bytes(kvq_model* model, size_t* bytes) {
  return call("kvq_attend_workspace_bytes", model, [&](kvq_model& m) {
    return bytes == nullptr ? missing("kvq_attend_workspace_bytes", "bytes") : m.model->workspace_bytes(*bytes);
  });
}

kvq_status kvq_get_fault(kvq_model* model, kvq_fault* fault) {
  return call("kvq_get_fault", model, [&](kvq_model& m) {
    if (auto s = check_size("kvq_get_fault", fault); s != KVQ_OK) return s;
    *fault = kvq_fault{.size = fault->size};
    m.model->take_fault(*fault);
    return KVQ_OK;
  });
}

kvq_status kvq_set_aliases(kvq_model* model, const kvq_alias* aliases, size_t count) {
  return call("kvq_set_aliases", model, [&](kvq_model& m) {
    if (count != 0 && aliases == nullptr) return missing("kvq_set_aliases", "aliases");
    return m.model->set_aliases(aliases, count, true, nullptr);
  });
}

kvq_status kvq_set_aliases_on(kvq_model* model, const kvq_alias* aliases, size_t count, void* stream) {
  return call("kvq_set_aliases_on", model, [&](kvq_model& m) {
    if (count != 0 && aliases == nullptr) return missing("kvq_set_aliases_on", "aliases");
    return m.model->set_aliases(aliases, count, false, stream);
  });
}

}  // extern "C"
