// A hostile process against the store: any bytes in its segment, any commands, any answers, in any order, while another
// tenant works and the daemon dies now and then, between calls or at any kill point.
//
// Invariant checked: the store's sums hold, and the other tenant's pages keep their bytes.
#include <optional>

#include "tests/fuzz/input.h"
#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

class Attack {
 public:
  explicit Attack(FuzzInput& in) : in_(in), mortal_(node_.make_mortal()) {
    executioner = {};
    hostile_tenant_ = node_.tenant("hostile", 4);
    const TenantId honest = node_.tenant("honest");
    victim_ = node_.client(honest);
    kept_ = victim().grow(1, 7, 5);
    KVQ_ASSERT(kept_.size() == 5);
    join();
  }

  void run() {
    for (int moves = 0; !in_.done() && moves < 400; ++moves) {
      move();
      if (moves % 16 == 0) check();
    }
    node_.ticks(3);
    check();
    if (client_ != nullptr) node_.end(client_);
    node_.ticks(3);
    check();
  }

 private:
  SimServer victim() { return {node_, *victim_}; }
  void join() {
    client_ = node_.client(hostile_tenant_, in_.below(5));
    std::memcpy(token_.data(), client_->segment().header.token, token_.size());
  }

  void check() {
    node_.store->check_invariants();
    for (std::uint32_t i = 0; i < kept_.size(); ++i) {
      KVQ_ASSERT(victim_->holds(kept_[i], value_of(chain_key(7, i))));
    }
  }

  Command command() {
    Command c{};
    c.kind = static_cast<CommandKind>(in_.below(12));
    c.flags = static_cast<std::uint16_t>(in_.below(4));
    c.sequence = SequenceId{in_.below(5)};
    if (in_.below(2) == 0 && !seen_.empty()) {
      const MagazineItem item = seen_[in_.below(256) % seen_.size()];
      c.page = item.page;
      c.generation = item.generation;
    } else {
      c.page = PageId{in_.take<std::uint32_t>()};
      c.generation = in_.take<std::uint8_t>();
    }
    c.index = in_.below(2) == 0 ? in_.below(8) : in_.take<std::uint32_t>();
    c.argument = in_.below(2) == 0 ? in_.below(6) : in_.take<std::uint32_t>();
    c.serial = in_.below(2) == 0 ? 0 : in_.take<std::uint64_t>();
    in_.copy(c.key, in_.below(2) == 0 ? 4 : 32);
    return c;
  }

  std::optional<MagazineItem> pop() {
    const auto& magazine = client_->segment().magazine;
    if (magazine.produced.load() - magazine.consumed.load() > kMagazineSlots) return std::nullopt;
    const auto item = client_->pop();
    if (item) seen_.push_back(*item);
    return item;
  }

  // What an honest server does, as far as the rings still allow it: the way to deep states.
  void grow() {
    Command c{};
    c.sequence = SequenceId{1 + in_.below(5)};
    c.kind = CommandKind::open;
    client_->send(c);
    (void)node_.store->request_credits(client_->id, 1 + in_.below(4));
    node_.tick();
    const std::uint32_t content = in_.below(3);
    for (std::uint32_t i = 0; i < 4; ++i) {
      const auto item = pop();
      if (!item) break;
      c.kind = CommandKind::take;
      c.page = item->page;
      c.generation = item->generation;
      c.index = i;
      client_->send(c);
      c.kind = CommandKind::seal;
      const Key key = chain_key(content, i);
      std::memcpy(c.key, key.data(), key.size());
      client_->send(c);
    }
    node_.store->drain_commands(client_->id, node_.now_ms);
  }

  // A command on a sequence that grow() may have made.
  void act() {
    const CommandKind kinds[] = {CommandKind::truncate, CommandKind::drop_before, CommandKind::fork, CommandKind::park,
                                 CommandKind::release};
    Command c{};
    c.kind = kinds[in_.below(5)];
    c.sequence = SequenceId{1 + in_.below(8)};
    c.index = in_.below(4);
    c.argument = 1 + in_.below(5);
    client_->send(c);
    const std::uint32_t content = in_.below(3), pages = 1 + in_.below(3);
    const Key key = chain_key(content, pages - 1);
    const PrefixHit hit = client_->find(key);
    (void)node_.store->attach(client_->id, SequenceId{1 + in_.below(8)}, hit.page, hit.generation, pages, key, false,
                              node_.now_ms);
  }

  // Writes to a page that may be sealed: its checksum finds it.
  void damage() {
    if (seen_.empty()) return;
    const PageId page = seen_[in_.below(256) % seen_.size()].page;
    if (raw(page) >= node_.config.max_pages) return;
    const Entry entry = client_->entry(page);
    std::byte* at =
        entry.state == EntryState::sealed && entry.format == Format::dense ? client_->address(entry) : nullptr;
    if (at != nullptr) in_.copy(at, 4);
    if (in_.below(2) == 1) node_.store->verify(std::nullopt);
  }

  void scribble() {
    auto* bytes = reinterpret_cast<std::byte*>(&client_->segment());
    const std::uint32_t at = in_.take<std::uint32_t>() % (kSegmentBytes - 64);
    in_.copy(bytes + at, 1 + in_.below(64));
    std::memcpy(client_->segment().header.token, token_.data(), token_.size());  // what it comes back with
  }

  void move() {
    switch (in_.below(18)) {
      case 0:
        return scribble();
      case 1:
      case 2:
      case 3:
        client_->send(command());
        return;
      case 4:
        node_.tick(in_.below(40));
        return;
      case 5:
        node_.store->drain_commands(client_->id, node_.now_ms);
        (void)node_.store->request_credits(client_->id, in_.take<std::uint16_t>());
        return;
      case 6: {
        Key key{};
        in_.copy(key.data(), 2);
        (void)node_.store->attach(client_->id, SequenceId{in_.below(6)}, PageId{in_.below(256)}, in_.below(3),
                                  in_.below(8), key, false, node_.now_ms);
        return;
      }
      case 7: {
        StepSlot& slot = client_->segment().step[in_.below(kStepSlots)];
        slot.epoch = in_.take<std::uint64_t>();
        slot.begun = in_.take<std::uint16_t>();
        slot.ended = in_.take<std::uint16_t>();
        return;
      }
      case 8:
        (void)pop();
        return;
      case 9:
        node_.store->acknowledge(client_->id, SlabId{in_.below(16)}, in_.below(2) == 0);
        return;
      case 10:
        return leave();
      case 11:
        if (victim().want(1, 3)) {
          const MagazineItem item = *victim_->pop();
          Command back = victim().command(CommandKind::return_credit, 0);
          back.page = item.page;
          back.generation = item.generation;
          KVQ_ASSERT(victim_->send(back));
        }
        return;
      case 12:
        return die();
      case 13:
      case 14:
        return grow();
      case 15:
        return act();
      case 16:
        return damage();
      default:
        node_.store->quantize(std::nullopt, 0, false, node_.now_ms);
        (void)node_.store->resume(client_->id, SequenceId{in_.below(6)}, node_.now_ms);
        node_.store->verify(std::nullopt);
    }
  }

  // Now, or at the next points of one kind or of any; the next daemon may die while it takes over.
  void die() {
    const std::uint32_t point = in_.below(kKillPoints + 8);
    executioner.at.reset();
    if (point < kKillPoints) executioner.at = static_cast<KillPoint>(point);
    executioner.countdown = in_.below(6);
    if (in_.below(4) == 3) mortal_.die();
  }

  void leave() {
    switch (in_.below(3)) {
      case 0:
        node_.store->disconnect(client_->id);
        break;
      case 1:
        (void)node_.store->evict(client_->id, node_.now_ms);
        break;
      default:
        node_.end(client_);
        join();
    }
  }

  FuzzInput& in_;
  StoreNode node_{9};
  MortalStore& mortal_;
  TenantId hostile_tenant_{};
  std::unique_ptr<SimClient> victim_, client_;
  std::vector<PageId> kept_;
  std::vector<MagazineItem> seen_;
  SessionToken token_{};
};

}  // namespace
}  // namespace kvq::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ::testing::GTEST_FLAG(break_on_failure) = true;
  kvq::testing::FuzzInput in(data, size);
  kvq::testing::Attack(in).run();
  return 0;
}
