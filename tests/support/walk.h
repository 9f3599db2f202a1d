// A seeded random walk over the whole store, and the model that says what each sequence must hold.
//
// Invariant: the model is plain maps that follow the protocol's words alone; it never asks the store what should be
// true. A step remembers the entries that a kernel may have loaded in it, and until it ends those places must keep
// their bytes.
#pragma once

#include <random>

#include "tests/support/sim_server.h"

namespace kvq::testing {

class Walk {
 public:
  struct Options {
    std::uint64_t seed = 1;
    std::uint32_t slabs = 10;
    std::uint64_t quota_slabs = 6;
    FakeDevice::Faults faults;
    bool deaths = true;
    bool daemon_dies = false;
    std::optional<KillPoint> dies_at;  // nothing: anywhere
  };

  explicit Walk(const Options& options)
      : options_(options), random_(options.seed), node_(options.slabs, StoreNode::small(), options.seed + 1) {
    node_.device.faults = options.faults;
    if (options.daemon_dies) mortal_ = &node_.make_mortal();
    tenants_ = {node_.tenant("a", options.quota_slabs), node_.tenant("b", 0, 2.0)};
    for (std::uint32_t i = 0; i < 4; ++i) join(i);
  }

  void run(int moves) {
    for (int i = 0; i < moves; ++i) {
      move();
      if (i % 7 == 0) check_contents();
      if (i % 23 == 0) check_counts();
      if (::testing::Test::HasFailure()) {
        FAIL() << "at move " << i << ", seed " << options_.seed << " (KVQ_TEST_SEED)";
      }
    }
  }

  // Ends everything and expects that nothing stays charged.
  void finish() {
    for (auto& a : actors_) {
      if (a.client) leave(a);
    }
    node_.device.faults = {};
    executioner.countdown = 0;
    ASSERT_TRUE(node_.store->resize(options_.slabs * StoreNode::kSlabBytes, false));
    for (TenantId t : tenants_) ASSERT_TRUE(node_.store->set_quota(t, StoreNode::kSlabBytes));
    for (int i = 0; i < 400 && node_.store->status().slabs_free < options_.slabs; ++i) node_.tick(20);
    const StoreStatus status = node_.store->status();
    EXPECT_EQ(status.slabs_free, options_.slabs);
    EXPECT_EQ(status.limbo_slots, 0u);
    for (const TenantStatus& t : status.tenants) {
      EXPECT_EQ(t.slab_bytes + t.page_bytes + t.limbo_bytes + t.free_bytes + t.cached_pages + t.open_pages, 0u)
          << t.name;
    }
    node_.store->check_invariants();
    EXPECT_EQ(node_.keeper.held().size(), 8 + (node_.device.has_mirrors() ? 4 : 3) * tenants_.size())
        << "a descriptor is kept that nothing needs";
  }

  // How often each interesting thing happened: a walk that never gets there tests nothing.
  struct Seen {
    std::uint64_t transcodes = 0, drops = 0, failures = 0, attaches = 0, refusals = 0, deaths = 0, int4_reads = 0;
    std::uint64_t lagging_reads = 0;  // kernels that would find an older entry than the directory has
    std::uint64_t daemon_deaths = 0;
  };
  Seen seen() {
    const StoreStatus s = node_.store->status();
    seen_.transcodes = s.counts.all_transcodes();
    seen_.drops = s.counts.drops;
    seen_.failures = s.counts.transcode_failures;
    seen_.daemon_deaths = mortal_ != nullptr ? mortal_->deaths : 0;
    return seen_;
  }

 private:
  struct Held {
    PageId page = kNullPage;
    std::uint16_t generation = 0;
    std::uint16_t value = 0;
    bool open = false;
  };
  struct Row {  // a sequence
    std::vector<Held> pages;
    std::uint32_t content = 0, kept_from = 0;
    bool running = true;
  };
  struct Step {
    std::uint64_t serial;
    std::vector<std::pair<Entry, std::uint16_t>> loaded;
  };
  struct Actor {
    std::uint32_t number = 0;
    std::unique_ptr<SimClient> client;
    std::map<std::uint32_t, Row> rows;
    std::vector<Step> steps;
    std::uint32_t next_row = 1;
    bool connected = true;
  };

  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(random_() % n); }
  SimServer server(Actor& a) { return {node_, *a.client}; }
  std::uint32_t layers(const Actor& a) const { return a.number == 3 ? 2 : 1; }

  void join(std::uint32_t number) {
    if (actors_.size() <= number) actors_.resize(number + 1);
    Actor& a = actors_[number];
    a = Actor{};
    a.number = number;
    a.client = node_.client(tenants_[number == 2 ? 1 : 0], below(4), layers(a));
    a.client->answers_at_once = below(4) != 0;
  }

  void leave(Actor& a) {
    verify_steps(a);
    node_.end(a.client);
    a = Actor{.number = a.number};
    ++seen_.deaths;
  }

  Row* some_row(Actor& a) {
    if (a.rows.empty()) return nullptr;
    return &std::next(a.rows.begin(), below(static_cast<std::uint32_t>(a.rows.size())))->second;
  }
  std::uint32_t id_of(Actor& a, const Row& row) {
    for (auto& [id, r] : a.rows) {
      if (&r == &row) return id;
    }
    return 0;
  }

  void move() {
    Actor& a = actors_[below(4)];
    if (mortal_ != nullptr && below(25) == 0) doom();
    if (!a.client) return join(a.number);
    if (options_.deaths && below(300) == 0) return leave(a);
    if (options_.deaths && below(300) == 0 && a.connected) {
      server(a).drain();
      node_.store->disconnect(a.client->id);
      a.connected = false;
      return;
    }
    const std::uint32_t what = below(100);
    if (what < 30) return void(node_.tick(below(4)));
    if (what < 34) return a.client->answer();
    if (what < 46) return step_move(a);
    if (!node_.store->is_ready(a.client->id)) return a.client->answer();
    if (what < 68) return grow(a);
    if (what < 76) return seal_some(a);
    if (what < 82) return attach(a);
    if (what < 91) return edit(a);
    if (what < 94) return give_back_credit(a);
    if (what < 96) return admin();
    return void(node_.tick(20));
  }

  // The daemon dies between two calls, or at one of the next kill points that it passes.
  void doom() {
    for (auto& [id, c] : node_.clients) c->stays_away = below(3) == 0;
    executioner.countdown = 0;
    node_.resume_all();
    executioner.at = options_.dies_at;
    executioner.countdown = 1 + below(options_.dies_at ? 2 : 20);
    if (below(3) != 0) return;
    if (below(2) == 0) executioner.countdown = 1 + below(3);  // the next daemon dies while it takes over
    mortal_->die();
  }

  void step_move(Actor& a) {
    verify_steps(a);
    if (a.steps.size() < 2 && below(3) == 0) {
      Step step{a.client->begin_step(), {}};
      for (auto& [id, row] : a.rows) {
        for (const Held& h : row.pages) {
          if (h.page != kNullPage) step.loaded.emplace_back(a.client->kernel_entry(h.page), h.value);
        }
      }
      a.steps.push_back(std::move(step));
    } else if (!a.steps.empty()) {
      const auto which = a.steps.begin() + below(static_cast<std::uint32_t>(a.steps.size()));
      a.client->end_step(which->serial);
      a.steps.erase(which);
    }
  }

  void verify_steps(Actor& a) {
    for (const Step& step : a.steps) {
      for (const auto& [entry, value] : step.loaded) {
        EXPECT_TRUE(a.client->holds(entry, value)) << "a step's page was reused; actor " << a.number;
      }
    }
  }

  void grow(Actor& a) {
    SimServer s = server(a);
    if (a.rows.size() < 3 && below(3) == 0) {
      const std::uint32_t id = a.next_row++;
      s.open(id);
      a.rows[id].content = below(3) + 100 * layers(a);
    }
    Row* row = some_row(a);
    if (row == nullptr || !row->running || row->pages.size() > 9) return;
    if (a.client->magazine() == 0) {
      s.drain();
      const Result<void> granted = node_.store->request_credits(a.client->id, 1 + below(2));
      if (!granted) {
        ++seen_.refusals;
        EXPECT_TRUE(granted.error().code == Errc::no_memory || !a.connected) << granted.error().context;
        if (below(8) == 0) node_.store->withdraw_credits(a.client->id);
        return;
      }
    }
    if (a.client->magazine() == 0) return;
    const auto index = static_cast<std::uint32_t>(row->pages.size());
    const Key key = chain_key(row->content, index);
    const MagazineItem item = s.take(id_of(a, *row), index, key);
    row->pages.push_back({item.page, item.generation, value_of(key), true});
  }

  void seal_some(Actor& a) {
    Row* row = some_row(a);
    if (row == nullptr) return;
    SimServer s = server(a);
    const std::uint64_t serial = a.steps.empty() || below(2) == 0 ? 0 : a.steps.back().serial;
    for (std::uint32_t i = 0; i < row->pages.size(); ++i) {
      Held& h = row->pages[i];
      if (!h.open) continue;
      h.open = false;
      s.seal(id_of(a, *row), i, {h.page, h.generation, 0}, chain_key(row->content, i), serial,
             below(6) == 0 ? kPrivate : std::uint16_t{0});
    }
  }

  void attach(Actor& a) {
    if (a.rows.size() >= 3 || !a.connected) return;
    const std::uint32_t content = below(3) + 100 * layers(a), pages = 1 + below(4), id = a.next_row++;
    const auto got = server(a).attach(id, content, pages, below(8) == 0);
    if (!got) return;
    ++seen_.attaches;
    Row& row = a.rows[id];
    row.content = content;
    for (std::uint32_t i = 0; i < pages; ++i) {
      const Entry e = a.client->entry((*got)[i]);
      row.pages.push_back({(*got)[i], e.generation, value_of(chain_key(content, i)), false});
    }
  }

  void edit(Actor& a) {
    Row* row = some_row(a);
    if (row == nullptr) return;
    SimServer s = server(a);
    const std::uint32_t id = id_of(a, *row);
    const auto count = static_cast<std::uint32_t>(row->pages.size());
    switch (below(9)) {
      case 0:
      case 1:
      case 6:
      case 7:
        s.release(id);
        a.rows.erase(id);
        break;
      case 2:
        s.park(id);
        row->running = false;
        break;
      case 3:
        s.drain();
        EXPECT_TRUE(node_.store->resume(a.client->id, SequenceId{id}, node_.now_ms));
        row->running = true;
        break;
      case 4: {
        const std::uint32_t keep = below(count + 1);
        s.act(CommandKind::truncate, id, keep);
        row->pages.resize(keep);
        row->kept_from = std::min(row->kept_from, keep);
        break;
      }
      case 5: {
        const std::uint32_t before = below(count + 1);
        s.act(CommandKind::drop_before, id, before);
        for (std::uint32_t i = 0; i < before; ++i) row->pages[i] = {};
        row->kept_from = std::max(row->kept_from, before);
        break;
      }
      default: {
        std::uint32_t share = 0;
        while (share < count && !row->pages[share].open) ++share;
        if (a.rows.size() >= 3) break;
        const std::uint32_t fresh = a.next_row++;
        s.act(CommandKind::fork, fresh, share, id);
        Row copy = *row;
        copy.pages.resize(share);
        copy.kept_from = std::min(copy.kept_from, share);
        copy.running = true;
        a.rows[fresh] = std::move(copy);
      }
    }
  }

  void give_back_credit(Actor& a) {
    const auto item = a.client->pop();
    if (!item) return;
    Command c = server(a).command(CommandKind::return_credit, 0);
    c.page = item->page;
    c.generation = item->generation;
    EXPECT_TRUE(a.client->send(c));
  }

  void admin() {
    switch (below(6)) {
      case 5:
        EXPECT_TRUE(node_.store->resize((2 + below(2 * options_.slabs - 1)) * StoreNode::kSlabBytes, below(4) == 0));
        break;
      case 0:
        node_.store->quantize(std::nullopt, below(20), below(2) == 0, node_.now_ms);
        break;
      case 3:
        node_.store->drop_cached(tenants_[below(2)], below(200), below(2) == 0, node_.now_ms);
        break;
      case 4:
        node_.store->compact(std::nullopt, below(4) == 0, node_.now_ms);
        break;
      case 1: {
        Watermarks w;
        w.quantize_at = 0.3 + 0.1 * below(5);
        EXPECT_TRUE(node_.store->set_watermarks(w));
        break;
      }
      default:
        EXPECT_TRUE(node_.store->set_quota(tenants_[0], (3 + below(6)) * StoreNode::kSlabBytes));
    }
  }

  void check_contents() {
    for (Actor& a : actors_) {
      if (!a.client) continue;
      verify_steps(a);
      for (const auto& [id, row] : a.rows) {
        for (std::uint32_t i = 0; i < row.pages.size(); ++i) {
          const Held& h = row.pages[i];
          if (h.page == kNullPage) continue;
          const Entry e = a.client->entry(h.page);
          EXPECT_EQ(e.generation, h.generation) << "actor " << a.number << " sequence " << id << " page " << i;
          EXPECT_TRUE(a.client->holds(e, h.value)) << "actor " << a.number << " sequence " << id << " page " << i;
          const Entry seen = a.client->kernel_entry(h.page);
          EXPECT_TRUE(a.client->holds(seen, h.value))
              << "through the mirror: actor " << a.number << " sequence " << id << " page " << i;
          seen_.lagging_reads += seen == e ? 0 : 1;
          seen_.int4_reads += e.format == Format::int4 ? 1 : 0;
        }
      }
    }
  }

  // References as the model counts them, against the store's.
  void check_counts() {
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> expected;
    for (Actor& a : actors_) {
      if (!a.client) continue;
      server(a).drain();
      EXPECT_EQ(a.client->segment().daemon.commands_refused.load(), 0u) << "actor " << a.number;
      for (const auto& [id, row] : a.rows) {
        for (const Held& h : row.pages) {
          if (h.page != kNullPage) ++expected[{raw(a.client->tenant), raw(h.page)}];
        }
      }
    }
    for (TenantId t : tenants_) {
      for (const PageStatus& p : node_.store->pages(t, 1000, node_.now_ms)) {
        const auto found = expected.find({raw(t), raw(p.page)});
        EXPECT_EQ(p.references, found == expected.end() ? 0 : found->second)
            << "page " << raw(p.page) << " " << p.state;
      }
    }
    for (const TenantStatus& t : node_.store->status().tenants) {
      EXPECT_EQ(t.slab_bytes, t.page_bytes + t.limbo_bytes + t.free_bytes) << t.name;
    }
    node_.store->check_invariants();
  }

  Options options_;
  std::mt19937_64 random_;
  StoreNode node_;
  MortalStore* mortal_ = nullptr;
  std::vector<TenantId> tenants_;
  std::vector<Actor> actors_;
  Seen seen_;
};

}  // namespace kvq::testing
