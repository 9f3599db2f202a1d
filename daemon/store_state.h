// What the store is made of. Included by daemon/store*.cc alone; the rest of kvqd sees store.h.
//
// Invariant: each fact has one owner: slots in the pool, page states in a tenant's page table, holds in the sequence
// table, bytes in the ledger, retired slots in a tenant's limbo. The functions here move a fact together with what
// follows from it (the directory entry, the prefix bucket, the session's words), and check_invariants() says what must
// agree. Durable facts change in transactions: whatever a public function, or one piece of a tick, has changed when it
// calls commit() stays together, and what clients may see of it (ring words) is shown after.
#pragma once

#include <deque>
#include <map>
#include <unordered_map>

#include "daemon/core/limbo.h"
#include "daemon/core/planner.h"
#include "daemon/core/prefix_index.h"
#include "daemon/core/slab_pool.h"
#include "daemon/core/tenant_ledger.h"
#include "daemon/store.h"
#include "daemon/store_tables.h"
#include "kvq/kill_point.h"

namespace kvq {

class StoreState final : public Store {
 public:
  // `tables`: fresh, or checked; then take_over() follows.
  StoreState(const StoreConfig& config, Device& device, DeliverNotice deliver, LogDecision log, Keeper* keeper,
             StoreTables tables);
  // Takes what an earlier daemon left, after check_records() has accepted it and the slabs are on the device.
  Result<void> take_over(std::vector<TenantFiles> tenants, Kept& kept, std::string& why, std::uint64_t now_ms);
  void note_undone(std::uint64_t bytes) { adopt_.undone_bytes = bytes; }
  void note_resized(const std::string& line) const {
    if (!line.empty()) log(line);
  }
  void note_refused(std::string why) { adopt_.refused = std::move(why); }

  TenantId add_tenant(const TenantSpec& spec) override;
  std::optional<TenantId> find_tenant(const std::string& name) const override;
  const TenantSpec& tenant(TenantId id) const override;
  Result<void> set_watermarks(const Watermarks& watermarks) override;
  Result<void> set_quota(TenantId id, std::uint64_t quota_bytes) override;
  Result<void> set_share(TenantId id, double share) override;
  void start_draining() override;

  Result<SessionId> open_session(const SessionRequest& request, std::uint64_t now_ms) override;
  SessionMemory memory(SessionId id) const override;
  bool is_ready(SessionId id) const override;
  void acknowledge(SessionId id, SlabId slab, bool mapped) override;
  void disconnect(SessionId id) override;
  void process_ended(SessionId id, std::uint64_t now_ms) override;
  Result<void> evict(SessionId id, std::uint64_t now_ms) override;
  std::vector<AdoptedSession> adopted_sessions() const override;
  Result<void> resume_session(SessionId id, const SessionToken& token, const SessionRequest& request,
                              std::uint64_t now_ms) override;

  std::uint32_t drain_commands(SessionId id, std::uint64_t now_ms) override;
  Result<void> request_credits(SessionId id, std::uint32_t pages) override;
  void withdraw_credits(SessionId id) override;
  Result<std::vector<PageId>> attach(SessionId id, SequenceId sequence, PageId last_page, std::uint16_t generation,
                                     std::uint32_t pages, const Key& key, bool floor_dense,
                                     std::uint64_t now_ms) override;
  Result<void> resume(SessionId id, SequenceId sequence, std::uint64_t now_ms) override;
  std::vector<LostPage> lost_pages(SessionId id, std::uint64_t since, std::uint64_t& now) const override;

  TickReport tick(std::uint64_t now_ms) override;
  std::vector<SessionId> take_notices() override;

  StoreStatus status() const override;
  std::vector<SessionStatus> sessions() const override;
  std::vector<PageStatus> pages(TenantId id, std::uint32_t limit, std::uint64_t now_ms) const override;
  SequenceList sequences(std::optional<TenantId> tenant, SessionId session, std::uint32_t limit,
                         std::uint64_t now_ms) const override;
  PrefixStatus prefix(std::optional<TenantId> tenant, std::uint32_t limit, std::uint64_t now_ms) const override;
  QuantizeReport quantize(std::optional<TenantId> id, std::uint64_t idle_ms, bool dry_run,
                          std::uint64_t now_ms) override;
  DropReport drop_cached(std::optional<TenantId> id, std::uint64_t idle_ms, bool dry_run,
                         std::uint64_t now_ms) override;
  CompactReport compact(std::optional<TenantId> id, bool dry_run, std::uint64_t now_ms) override;
  Result<ResizeReport> resize(std::uint64_t arena_bytes, bool dry_run) override;
  void verify(std::optional<TenantId> id) override;
  void check_invariants() const override;

 private:
  // A complete page waiting for the end of the step that writes it: the rest is in its record.
  struct PendingSeal {
    PageId page;
    std::uint16_t generation;
  };

  // A slot that no entry names any more, though kernels that start now may still read the old one in the mirror.
  struct Unpublished {
    SlotRef slot;
    std::uint64_t publication;
  };

  // A slab that an operator wants to be empty, and which one of those that have had its place.
  struct Emptying {
    SlabId slab;
    std::uint64_t serial;
  };

  // Why a wish for credits is not met.
  enum class Obstacle : std::uint8_t { none, waiting, quota, arena, page_ids };

  struct Tenant {
    TenantId id{};
    TenantSpec spec;
    TableFile<PageRecord> page_file;
    DirectoryWriter directory;
    PrefixFile prefix_file;
    std::unique_ptr<PageTable> pages;
    std::unique_ptr<PrefixIndex> prefix;
    Limbo limbo;
    std::deque<Unpublished> retiring;  // waits for the mirror, then goes to limbo
    bool mirror_kept = false;          // on devices that have mirrors
    bool configured = false;           // add_tenant has named it in this daemon's life
    bool retired_in_epoch = false;     // something was tagged with the current epoch
    std::deque<PendingSeal> seals;
    std::vector<SessionId> sessions;
    std::deque<std::pair<PageId, std::uint16_t>> asked;      // operators want these quantized: page and generation
    std::deque<std::pair<PageId, std::uint16_t>> unwanted;   // and these dropped, unless they are used after
    std::uint64_t unwanted_until_ms = 0;                     // this
    std::deque<Emptying> emptying;                           // one after the other
    std::deque<std::pair<PageId, std::uint16_t>> unchecked;  // sealed and without a checksum yet
    std::deque<std::pair<PageId, std::uint16_t>> verify;     // to be compared with their checksums
    PressureLevel level = PressureLevel::calm;               // of its quota
    std::uint32_t boost = 0;                                 // levels added because wishes stay unmet
    std::uint64_t wish_bytes = 0;                            // of its unmet wishes, at the last tick
    std::uint32_t missing_ids = 0;                           // page ids that they lack
    std::uint64_t leaving_bytes = 0;                         // slots that jobs in flight move pages out of
    Obstacle obstacle = Obstacle::none;
    TenantCounts counts;
  };

  struct Session {
    SessionId id{};
    SessionRequest request;
    std::uint16_t model = 0;
    SessionSegment segment;
    SessionRecord* record = nullptr;
    bool waits = false;  // adopted, and its client has not come back yet: it maps and acknowledges nothing until then
    bool connected = true, ready = false, changed = false, told_broken = false;
    std::vector<SlabId> unmapped;  // map notices sent before it was ready and not acknowledged yet
    std::unordered_map<std::uint32_t, SequenceIndex> sequences;
    std::uint32_t credits = 0;                    // pages in state credit that it owns
    std::optional<std::uint64_t> hidden_credits;  // the magazine is shown once this publication has been seen
    std::uint32_t wish = 0;                       // pages that a parked request waits for
    std::uint64_t wish_order = 0;                 // earlier wishes are served first
    Epoch oldest_step{};                          // of its open steps, at the last tick
    bool step_open = false;                       // there was one
    std::uint64_t oldest_since_ms = 0;
    std::vector<LostPage> lost;  // the newest of those that DaemonWords.lost_pages counts
  };

  struct SlabUse {
    TenantLedger::Charge charge;
    std::vector<SessionId> importers;  // were told to map it and have not said that it is unmapped
    std::uint32_t checks = 0;          // jobs that read pages in it: it stays mapped until they are over
    std::vector<SessionId> awaited;    // must answer before the slab becomes ready, or can be destroyed
  };

  struct Job {
    TenantId tenant{};
    PageId page{};
    std::uint16_t generation = 0;  // of a check, as the next
    std::uint32_t moved_before = 0;
    SlotRef from, to;
    std::uint64_t started_ms = 0;
    std::optional<std::uint16_t> measured;  // layer
    Format format = Format::none;           // of the destination
    bool moves = false;                     // a compaction: same format, another slab
    bool checks = false;                    // reads only: to sum the page up, or to compare it with its checksum
    bool verifies = false;                  // it counts for status().verify
  };

  // store.cc
  Tenant& tenant_of(TenantId id) { return *tenants_.at(raw(id) - 1); }
  const Tenant& tenant_of(TenantId id) const { return *tenants_.at(raw(id) - 1); }
  Session* find_session(SessionId id);
  const Session* find_session(SessionId id) const;
  void add_files(Tenant& t, TenantFiles files, Descriptor mirror);
  void write_tenant(Tenant& t);
  // Ends a transaction: what was changed since the last one stays, whatever happens to this process.
  void commit() { journal_.commit(); }
  void keep(const std::string& name, int fd) {
    if (keeper_ != nullptr) keeper_->keep(name, fd);
  }
  void forget(const std::string& name) {
    if (keeper_ != nullptr) keeper_->forget(name);
  }
  JournalRegion region(TableKind kind, std::span<std::byte> bytes, TenantId tenant = {}) {
    return {&journal_, journal_region(kind, tenant), bytes.data()};
  }
  template <typename T>
  void save(const Session&, const T& field) {  // of its record
    region(TableKind::sessions, tables_.sessions.bytes()).save(field);
  }
  bool keeps_dense(const Session& s) const {
    return s.request.floor_dense || tenant_of(s.request.tenant).spec.floor_dense;
  }
  WindowPolicy window() const { return {config_.window_pages, config_.sink_pages}; }
  void log(const std::string& line) const {
    if (log_) log_(line);
  }

  // store_slabs.cc
  bool can_create_slab(const Tenant& t, bool for_transcode, Obstacle* obstacle) const;
  bool create_slab(Tenant& t, std::uint16_t model, Format format, bool for_transcode, Obstacle* obstacle);
  void make_ready_if_answered(SlabId slab);
  void finish_drain_if_answered(SlabId slab);
  void return_slab(SlabId slab);
  void forget_importer(SessionId id);
  SlabRecord& slab_record(SlabId slab) { return tables_.slabs.records()[raw(slab)]; }
  void queue_notice(SessionId id, SlabId slab, bool map);
  void deliver_notices();
  void settle_readiness(Session& s);

  // store_pages.cc
  void publish(Tenant& t, PageId page, const Entry& entry);
  void retire_unpublished(Tenant& t, SlotRef slot);
  void settle_published();
  bool show_credits(Session& s);
  bool give_credit(Session& s);
  bool fill(Session& s, std::uint32_t pages);
  void retire_page(Tenant& t, PageId page);
  void released(Tenant& t, PageId page);
  void rehold(const SequenceRecord& before, const SequenceRecord& after, SequenceIndex s, std::uint32_t from,
              std::uint32_t to);
  void reap(Tenant& t, std::uint64_t now_ms);
  Epoch oldest_open(const Tenant& t) const;

  // store_lists.cc
  void count_page(const Tenant& t, PageId page, FormatUse (&format)[kFormatCount]) const;
  SequenceStatus status_of(const SequenceRecord& r, SequenceIndex sequence, std::uint64_t now_ms) const;

  // store_seals.cc
  void settle_seals(Tenant& t);
  bool step_is_over(const PageRecord& page, bool* complete) const;
  void seal_page(Tenant& t, PageId page, bool complete);

  // store_commands.cc
  bool apply(Session& s, const Command& c);
  bool open_sequence(Session& s, const Command& c);
  bool take_page(Session& s, const Command& c);
  bool seal_command(Session& s, const Command& c);
  bool fork_sequence(Session& s, const Command& c);
  bool return_credit(Session& s, const Command& c);
  bool apply_to_sequence(const Command& c, SequenceIndex sequence);
  std::optional<SequenceIndex> find_sequence(const Session& s, SequenceId id) const;
  std::optional<SequenceIndex> new_sequence(Session& s, SequenceId id, std::uint16_t flags);

  // store_sequences.cc
  bool append_page(SequenceIndex sequence, PageId page);
  void cut_sequence(SequenceIndex sequence, std::uint32_t pages);
  void cut_piece(SequenceIndex sequence, std::uint32_t pages);
  void drop_before(SequenceIndex sequence, std::uint32_t index);
  void drop_piece(SequenceIndex sequence, std::uint32_t index);
  std::optional<std::vector<PageId>> same_attach(const Tenant& t, SequenceIndex sequence, PageId last_page,
                                                 std::uint16_t generation, std::uint32_t pages, const Key& key) const;
  void set_sequence_flags(SequenceIndex sequence, std::uint16_t flags);
  void end_sequence(Session& s, SequenceIndex sequence);

  // store_sessions.cc
  void release_all(Session& s);
  void write_session(SessionRecord& r, const SessionSegment::Spec& spec, const SessionRequest& request,
                     std::uint16_t model);
  SessionRecord* free_session_record();

  // store_take_over.cc
  void take_tenant(const TenantRecord& record, TenantFiles files, Kept& kept);
  void take_slabs();
  Result<void> take_sessions(Kept& kept, std::string& why);
  void take_sequences();
  void take_pages(Tenant& t, std::vector<PageUse>& uses);
  void settle_pages(Tenant& t);
  void publish_all(Tenant& t);
  void end_unready();
  void forget_unknown(Kept& kept);

  // store_integrity.cc
  void start_check(Tenant& t, PageId page, bool verifies);
  void start_checks();
  void finish_check(const Job& job, const TranscodeDone& done);
  void quarantine(Tenant& t, PageId page);
  void unname(Tenant& t, PageId page);
  void tell_lost(Tenant& t, PageId page);
  void verify_tenant(Tenant& t);

  // store_transcode.cc
  static std::optional<std::uint64_t> checksum_of(const PageRecord& r);
  void count_layers(const ModelGeometry& g) {
    if (g.layers > counts_.noise.size()) counts_.noise.resize(g.layers);
  }
  std::optional<std::uint16_t> next_measured(const PageRecord& r, Format to);
  bool start_transcode(Tenant& t, PageId page, Format to, std::optional<SlabId> leave);
  void submit_jobs();
  void finish_jobs(TickReport& report);
  void finish_job(const Job& job, const TranscodeDone& done, TickReport& report);

  // store_pressure.cc
  void measure_pressure();
  void note_wishes();
  Snapshot snapshot() const;
  TenantView view_of(const Tenant& t) const;
  void list_dense(const Tenant& t, VictimList list, std::map<std::uint16_t, std::uint64_t>& room,
                  std::vector<Victim>& out) const;
  std::uint64_t cold_room(const Tenant& t, std::uint16_t model) const;
  void list_cached(const Tenant& t, std::vector<Victim>& out) const;
  std::uint64_t room_beside(const Tenant& t, SlabId slab) const;
  std::optional<MergeView> merge_of(const Tenant& t, SlabId slab, bool begun) const;
  void list_merges(const Tenant& t, TenantView& view) const;
  bool has_cut_off_reader(const Tenant& t) const;
  void carry_out(const std::vector<Action>& actions, TickReport& report);
  bool drop_page(Tenant& t, PageId page);
  std::uint64_t coming_bytes(const Tenant& t) const;
  std::uint64_t kept_bytes(const Tenant& t) const;

  // store_asked.cc
  void quantize_asked(TickReport& report);
  void list_unwanted(const Tenant& t, std::uint64_t until_ms, std::vector<PageId>& out) const;
  void drop_unwanted(TickReport& report);
  void list_emptied(const Tenant& t, std::vector<SlabId>& out) const;
  void settle_emptying();

  // store_tick.cc
  void serve_wishes(TickReport& report);
  void fill_targets(TickReport& report);
  std::vector<Session*> wishers();
  void make_slabs(TickReport& report);
  bool may_have_pages(const Session& s) const;
  bool is_urgent() const;
  void note_steps(std::uint64_t now_ms);
  std::uint64_t open_ms(const Session& s) const { return now_ms_ - std::min(now_ms_, s.oldest_since_ms); }
  void update_words(Session& s);
  PressureLevel level_of(const Tenant& t) const { return std::max(t.level, arena_level_); }
  bool is_busy() const;

  StoreConfig config_;
  Device& device_;
  DeliverNotice deliver_;
  LogDecision log_;
  Keeper* const keeper_;
  std::uint64_t now_ms_ = 0;  // of the last call that told

  StoreTables tables_;
  Journal journal_;
  std::unique_ptr<Layouts> layouts_;
  std::unique_ptr<SequenceTable> sequences_;
  SlabPool pool_;
  TenantLedger ledger_;
  std::vector<SlabUse> slab_use_;
  std::vector<std::unique_ptr<Tenant>> tenants_;  // id - 1
  std::map<SessionId, std::unique_ptr<Session>> sessions_;
  std::uint64_t last_wish_ = 0;
  std::unordered_map<std::uint64_t, Job> jobs_;
  std::uint64_t last_job_ = 0;
  std::size_t checks_in_flight_ = 0;  // of jobs_
  std::vector<TranscodeJob> unsubmitted_;
  std::vector<TranscodeDone> done_;  // kept for its capacity
  std::deque<SlabNotice> notices_;
  bool delivering_ = false, draining_ = false;
  PressureLevel arena_level_ = PressureLevel::calm;
  std::uint32_t arena_boost_ = 0;
  StoreCounts counts_;
  std::uint64_t measure_at_ms_ = 0;    // no page is measured before
  std::uint32_t last_measured_ = ~0u;  // layer, in the order of turns
  VerifyStatus verify_;
  AdoptReport adopt_;
  std::optional<std::uint64_t> create_failed_ms_;  // when the device last found no memory for a slab
};

}  // namespace kvq
