// A store whose daemon dies at kill points, or between calls, and is taken over by the next one: what clients see must
// be as if it had lived on.
//
// Invariant: death is an exception from the kill point through the store, whose destructors touch no durable memory; so
// what is left is what SIGKILL would have left. Each call is repeated in the next daemon until one survives it.
#pragma once

#include <fcntl.h>

#include <array>
#include <functional>
#include <memory>
#include <type_traits>

#include "daemon/store.h"
#include "kvq/kill_point.h"

namespace kvq::testing {

// The holder: keeps duplicates by name.
class MapKeeper final : public Keeper {
 public:
  void keep(const std::string& name, int fd) override { held_[name] = Descriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 3)); }
  void forget(const std::string& name) override { held_.erase(name); }
  Kept hand_over() const {
    Kept out;
    for (const auto& [name, fd] : held_) out[name] = Descriptor(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 3));
    return out;
  }
  const Kept& held() const { return held_; }

 private:
  Kept held_;
};

struct Killed {
  KillPoint point;
};

// Which point kills next. Process-wide, since points are.
struct Executioner {
  std::array<std::uint64_t, kKillPoints> reached{};
  std::optional<KillPoint> at;  // nothing: at any point
  std::uint32_t countdown = 0;  // 0: nobody is killed
  std::uint64_t kills = 0;
};
inline Executioner executioner;

#if defined(KVQ_KILL_POINTS)
inline void execute(KillPoint point) {
  ++executioner.reached[static_cast<std::size_t>(point)];
  if (executioner.countdown == 0 || (executioner.at && *executioner.at != point)) return;
  if (--executioner.countdown > 0) return;
  ++executioner.kills;
  throw Killed{point};
}
#endif

class MortalStore final : public Store {
 public:
  // `start` makes the first daemon's store, `adopt` a later one's; it returns null when it was killed itself.
  using Start = std::function<std::unique_ptr<Store>()>;
  MortalStore(std::unique_ptr<Store> first, Start adopt) : store_(std::move(first)), adopt_(std::move(adopt)) {
#if defined(KVQ_KILL_POINTS)
    kill_point_hook = execute;
#endif
  }
  ~MortalStore() override {
#if defined(KVQ_KILL_POINTS)
    kill_point_hook = nullptr;
#endif
  }

  // Dies here and now.
  void die() { revive(); }
  std::uint64_t deaths = 0;
  std::function<void()> after_adoption = [] {};

  TenantId add_tenant(const TenantSpec& spec) override {
    return alive([&] {
      const auto known = store_->find_tenant(spec.name);
      return known ? *known : store_->add_tenant(spec);
    });
  }
  std::optional<TenantId> find_tenant(const std::string& name) const override { return store_->find_tenant(name); }
  const TenantSpec& tenant(TenantId id) const override { return store_->tenant(id); }
  Result<void> set_watermarks(const Watermarks& w) override { return store_->set_watermarks(w); }
  Result<void> set_quota(TenantId id, std::uint64_t bytes) override { return store_->set_quota(id, bytes); }
  Result<void> set_share(TenantId id, double share) override { return store_->set_share(id, share); }
  void start_draining() override { store_->start_draining(); }
  Result<SessionId> open_session(const SessionRequest& request, std::uint64_t now_ms) override {
    return alive([&] { return store_->open_session(request, now_ms); });
  }
  SessionMemory memory(SessionId id) const override { return store_->memory(id); }
  bool is_ready(SessionId id) const override { return store_->is_ready(id); }
  void acknowledge(SessionId id, SlabId slab, bool mapped) override {
    alive([&] { store_->acknowledge(id, slab, mapped); });
  }
  void disconnect(SessionId id) override {
    alive([&] { store_->disconnect(id); });
  }
  void process_ended(SessionId id, std::uint64_t now_ms) override {
    alive([&] { store_->process_ended(id, now_ms); });
  }
  Result<void> evict(SessionId id, std::uint64_t now_ms) override {
    return alive([&] { return store_->evict(id, now_ms); });
  }
  std::vector<AdoptedSession> adopted_sessions() const override { return store_->adopted_sessions(); }
  Result<void> resume_session(SessionId id, const SessionToken& token, const SessionRequest& request,
                              std::uint64_t now_ms) override {
    return store_->resume_session(id, token, request, now_ms);
  }
  std::uint32_t drain_commands(SessionId id, std::uint64_t now_ms) override {
    return alive([&] { return store_->drain_commands(id, now_ms); });
  }
  Result<void> request_credits(SessionId id, std::uint32_t pages) override {
    return alive([&] { return store_->request_credits(id, pages); });
  }
  void withdraw_credits(SessionId id) override { store_->withdraw_credits(id); }
  Result<std::vector<PageId>> attach(SessionId id, SequenceId sequence, PageId last_page, std::uint16_t generation,
                                     std::uint32_t pages, const Key& key, bool floor_dense,
                                     std::uint64_t now_ms) override {
    return alive([&] { return store_->attach(id, sequence, last_page, generation, pages, key, floor_dense, now_ms); });
  }
  Result<void> resume(SessionId id, SequenceId sequence, std::uint64_t now_ms) override {
    return alive([&] {
      store_->drain_commands(id, now_ms);
      return store_->resume(id, sequence, now_ms);
    });
  }
  std::vector<LostPage> lost_pages(SessionId id, std::uint64_t since, std::uint64_t& now) const override {
    return store_->lost_pages(id, since, now);
  }
  TickReport tick(std::uint64_t now_ms) override {
    return alive([&] { return store_->tick(now_ms); });
  }
  std::vector<SessionId> take_notices() override { return store_->take_notices(); }
  StoreStatus status() const override { return store_->status(); }
  std::vector<SessionStatus> sessions() const override { return store_->sessions(); }
  std::vector<PageStatus> pages(TenantId id, std::uint32_t limit, std::uint64_t now_ms) const override {
    return store_->pages(id, limit, now_ms);
  }
  SequenceList sequences(std::optional<TenantId> tenant, SessionId session, std::uint32_t limit,
                         std::uint64_t now_ms) const override {
    return store_->sequences(tenant, session, limit, now_ms);
  }
  PrefixStatus prefix(std::optional<TenantId> tenant, std::uint32_t limit, std::uint64_t now_ms) const override {
    return store_->prefix(tenant, limit, now_ms);
  }
  QuantizeReport quantize(std::optional<TenantId> id, std::uint64_t idle_ms, bool dry_run,
                          std::uint64_t now_ms) override {
    return store_->quantize(id, idle_ms, dry_run, now_ms);
  }
  DropReport drop_cached(std::optional<TenantId> id, std::uint64_t idle_ms, bool dry_run,
                         std::uint64_t now_ms) override {
    return store_->drop_cached(id, idle_ms, dry_run, now_ms);
  }
  CompactReport compact(std::optional<TenantId> id, bool dry_run, std::uint64_t now_ms) override {
    return store_->compact(id, dry_run, now_ms);
  }
  Result<ResizeReport> resize(std::uint64_t bytes, bool dry_run) override { return store_->resize(bytes, dry_run); }
  void verify(std::optional<TenantId> id) override { store_->verify(id); }
  void check_invariants() const override { store_->check_invariants(); }

 private:
  void revive() {
    do {
      ++deaths;
      store_.reset();
      try {
        store_ = adopt_();
      } catch (const Killed&) {
      }
    } while (store_ == nullptr);
    executioner.countdown = 0;  // clients come back in peace
    after_adoption();
  }

  template <typename Body>
  std::invoke_result_t<Body> alive(Body body) {
    if (inside_) return body();  // called back from within: the whole daemon dies, not the callback
    struct Inside {
      bool& inside;
      explicit Inside(bool& flag) : inside(flag) { inside = true; }
      ~Inside() { inside = false; }
    };
    for (;;) {
      try {
        const Inside guard(inside_);
        return body();
      } catch (const Killed&) {
        revive();
      }
    }
  }

  std::unique_ptr<Store> store_;
  Start adopt_;
  bool inside_ = false;
};

}  // namespace kvq::testing
