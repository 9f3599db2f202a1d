// kvq.h: sequences.
//
// Invariant: as in abi.cc: checks of handles, sizes and pointers only.
#include "client/abi.h"

using namespace kvq::client;  // NOLINT: this file is the border of that namespace

namespace {

kvq_status hand_over(std::unique_ptr<Sequence> sequence, kvq_sequence** out) {
  auto handle = std::make_unique<kvq_sequence>();
  handle->sequence = std::move(sequence);
  *out = handle.release();
  return KVQ_OK;
}

// Handles of a batch, checked one by one.
kvq_status unwrap(kvq_sequence* const* handles, std::size_t count, std::vector<Sequence*>& out) {
  for (std::size_t i = 0; i < count; ++i) {
    const kvq_status known = call("kvq_reserve_batch", handles[i], [&](kvq_sequence& s) {
      out.push_back(s.sequence.get());
      return KVQ_OK;
    });
    if (known != KVQ_OK) return known;
  }
  return KVQ_OK;
}

}  // namespace

extern "C" {

kvq_status kvq_sequence_open(kvq_model* model, const uint32_t* tokens, uint64_t token_count,
                             const kvq_open_options* options, uint64_t* cached_tokens, kvq_sequence** sequence) {
  return call("kvq_sequence_open", model, [&](kvq_model& m) {
    if (sequence == nullptr) return missing("kvq_sequence_open", "sequence");
    if (tokens == nullptr && token_count != 0) return missing("kvq_sequence_open", "tokens");
    kvq_open_options used{.size = sizeof(used)};
    if (options != nullptr) {
      if (auto s = check_size("kvq_sequence_open", options); s != KVQ_OK) return s;
      used = *options;
    }
    std::unique_ptr<Sequence> made;
    if (auto s = Sequence::open(m.model, {tokens, token_count}, used, made); s != KVQ_OK) return s;
    if (cached_tokens != nullptr) *cached_tokens = made->committed();
    return hand_over(std::move(made), sequence);
  });
}

kvq_status kvq_reserve(kvq_sequence* sequence, uint64_t tokens, uint32_t deadline_ms) {
  return call("kvq_reserve", sequence, [&](kvq_sequence& s) {
    Sequence* const one[] = {s.sequence.get()};
    return Sequence::reserve(one, &tokens, deadline_ms);
  });
}

kvq_status kvq_reserve_batch(kvq_sequence* const* sequences, const uint64_t* tokens, size_t count,
                             uint32_t deadline_ms) {
  return guarded("kvq_reserve_batch", [&] {
    if (count == 0) return KVQ_OK;
    if (sequences == nullptr || tokens == nullptr)
      return missing("kvq_reserve_batch", sequences == nullptr ? "sequences" : "tokens");
    std::vector<Sequence*> batch;
    if (auto s = unwrap(sequences, count, batch); s != KVQ_OK) return s;
    return Sequence::reserve(batch, tokens, deadline_ms);
  });
}

kvq_status kvq_commit(kvq_sequence* sequence, const uint32_t* tokens, uint64_t token_count, uint64_t step,
                      uint32_t step_session) {
  return call("kvq_commit", sequence, [&](kvq_sequence& s) {
    if (tokens == nullptr && token_count != 0) return missing("kvq_commit", "tokens");
    return s.sequence->commit({tokens, token_count}, step, step_session);
  });
}

kvq_status kvq_truncate(kvq_sequence* sequence, uint64_t tokens, uint32_t deadline_ms) {
  return call("kvq_truncate", sequence, [&](kvq_sequence& s) { return s.sequence->truncate(tokens, deadline_ms); });
}

kvq_status kvq_drop_before(kvq_sequence* sequence, uint64_t position) {
  return call("kvq_drop_before", sequence, [&](kvq_sequence& s) { return s.sequence->drop_before(position); });
}

kvq_status kvq_fork(kvq_sequence* sequence, uint32_t deadline_ms, kvq_sequence** child) {
  return call("kvq_fork", sequence, [&](kvq_sequence& s) {
    if (child == nullptr) return missing("kvq_fork", "child");
    std::unique_ptr<Sequence> made;
    if (auto status = s.sequence->fork(deadline_ms, made); status != KVQ_OK) return status;
    return hand_over(std::move(made), child);
  });
}

kvq_status kvq_park(kvq_sequence* sequence) {
  return call("kvq_park", sequence, [](kvq_sequence& s) { return s.sequence->park(); });
}

kvq_status kvq_resume(kvq_sequence* sequence, uint32_t deadline_ms) {
  return call("kvq_resume", sequence, [&](kvq_sequence& s) { return s.sequence->resume(deadline_ms); });
}

kvq_status kvq_sequence_release(kvq_sequence* sequence) {
  if (sequence == nullptr) return KVQ_OK;
  return call("kvq_sequence_release", sequence, [](kvq_sequence& s) {
    delete &s;
    return KVQ_OK;
  });
}

kvq_status kvq_sequence_get_info(kvq_sequence* sequence, kvq_sequence_info* info) {
  return call("kvq_sequence_get_info", sequence, [&](kvq_sequence& s) {
    if (auto status = check_size("kvq_sequence_get_info", info); status != KVQ_OK) return status;
    return s.sequence->get_info(*info);
  });
}

kvq_status kvq_block_table(kvq_sequence* sequence, int32_t* out, size_t capacity, size_t* count) {
  return call("kvq_block_table", sequence, [&](kvq_sequence& s) {
    if (out == nullptr && capacity != 0) return missing("kvq_block_table", "out");
    return s.sequence->block_table(out, capacity, count);
  });
}

kvq_status kvq_slot_mapping(kvq_sequence* sequence, uint64_t first, uint64_t count, int64_t* out) {
  return call("kvq_slot_mapping", sequence, [&](kvq_sequence& s) {
    if (out == nullptr && count != 0) return missing("kvq_slot_mapping", "out");
    return s.sequence->slot_mapping(first, count, out);
  });
}

kvq_status kvq_sequence_export(kvq_sequence* sequence, void* out, size_t capacity, size_t* bytes) {
  return call("kvq_sequence_export", sequence,
              [&](kvq_sequence& s) { return s.sequence->export_bytes(out, capacity, bytes); });
}

kvq_status kvq_sequence_import(kvq_model* model, const void* data, size_t bytes, kvq_sequence** sequence) {
  return call("kvq_sequence_import", model, [&](kvq_model& m) {
    if (sequence == nullptr) return missing("kvq_sequence_import", "sequence");
    std::unique_ptr<Sequence> made;
    if (auto s = Sequence::import(m.model, data, bytes, made); s != KVQ_OK) return s;
    return hand_over(std::move(made), sequence);
  });
}

}  // extern "C"
