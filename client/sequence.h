// A sequence: one token stream, its block table and the names of its full pages.
//
// Invariant: pages [0, committed / 64) are sealed or a seal command for each is on its way (never written again); those
// behind are open and this session's alone. keys holds one key for each of the former (none when private). Places below
// first_kept were given up and hold the null page. One thread at a time uses a sequence; the model's lock guards the
// rings it shares.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/lookup.h"
#include "client/model.h"
#include "kvq/kvq.h"

namespace kvq::client {

struct Place {
  PageId page{};
  std::uint16_t generation = 0;
};

// Copies and checks the caller's extra keys.
kvq_status read_extra_keys(const kvq_extra_key* keys, std::size_t count, std::vector<ExtraKey>& out);

class Sequence {
 public:
  static kvq_status open(std::shared_ptr<Model> model, std::span<const std::uint32_t> tokens,
                         const kvq_open_options& options, std::unique_ptr<Sequence>& out);
  static kvq_status import(std::shared_ptr<Model> model, const void* data, std::size_t bytes,
                           std::unique_ptr<Sequence>& out);
  ~Sequence();  // releases it at the daemon, unless it is a view or the session is lost
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Makes room for tokens[i] tokens past the committed ones of sequences[i]; all or nothing.
  static kvq_status reserve(std::span<Sequence* const> sequences, const std::uint64_t* tokens,
                            std::uint32_t deadline_ms);
  kvq_status commit(std::span<const std::uint32_t> tokens, std::uint64_t step, std::uint32_t step_session);
  kvq_status truncate(std::uint64_t tokens, std::uint32_t deadline_ms);
  kvq_status drop_before(std::uint64_t position);
  kvq_status fork(std::uint32_t deadline_ms, std::unique_ptr<Sequence>& child);
  kvq_status park();
  kvq_status resume(std::uint32_t deadline_ms);

  kvq_status get_info(kvq_sequence_info& out) const;
  kvq_status block_table(std::int32_t* out, std::size_t capacity, std::size_t* count) const;
  kvq_status slot_mapping(std::uint64_t first, std::uint64_t count, std::int64_t* out) const;
  kvq_status export_bytes(void* out, std::size_t capacity, std::size_t* bytes) const;

  std::uint64_t committed() const { return committed_; }
  const Model& model() const { return *model_; }

 private:
  explicit Sequence(std::shared_ptr<Model> model) : model_(std::move(model)) {}
  kvq_status attach_or_open(CachedPrefix& prefix);
  kvq_status check_usable(const char* call) const;  // own, running, model open, session not lost
  std::uint64_t full_pages() const { return committed_ / kPageTokens; }
  Command command(CommandKind kind) const;
  Command seal_command(std::uint64_t page, std::uint64_t step, std::uint32_t step_session) const;
  void push_commit(Rings& rings) const;
  void take(Rings& rings, const MagazineItem& item, std::uint64_t at);
  kvq_status cut(std::uint64_t tokens, std::uint64_t keep_pages);
  kvq_status cut_inside_sealed(std::uint64_t tokens, std::uint32_t deadline_ms);
  kvq_status share_with(Sequence& child, const std::vector<MagazineItem>& fresh, kvq_status copied);

  std::shared_ptr<Model> model_;
  SequenceId id_{};
  std::vector<std::uint32_t> tokens_;  // committed ones; empty for a view
  std::vector<Key> keys_;
  std::vector<Place> places_;  // the block table
  std::vector<ExtraKey> extra_keys_;
  std::uint64_t committed_ = 0;
  std::uint64_t first_kept_ = 0;
  std::uint64_t written_in_ = 0;  // newest own step that wrote committed tokens, as commit was told
  bool private_ = false, floor_dense_ = false, parked_ = false, view_ = false;
};

}  // namespace kvq::client
