// A daemon is killed anywhere in a move; the next one adopts what it left, while steps go on.
//
// Invariant: the record is the truth. What was not committed is undone, entries are written anew from the records, and
// every place that no record names rests in limbo like one that was retired now, since nobody knows any more who reads
// it. The next daemon knows all that the last one stored: it starts after that process has ended.
#include "daemon/core/limbo.h"
#include "tests/epochs/scenario.h"

namespace kvq::model {
namespace {

using M = ModelMemory;

enum class Rule {
  kept,
  unnamed_places_rest_in_limbo,    // broken: they are given to other pages at once
  every_unnamed_place_rests,       // broken: only those that the last daemon had in limbo, not a move's destination
  entries_are_written_anew,        // broken: they stay as the last daemon left them
  epoch_goes_on,                   // broken: it starts at 1 again
  advance_before_scan,             // broken: the next daemon scans without a new epoch
  retired_pages_keep_their_entry,  // broken: the entry of a page that was retired becomes free
  clients_outlive_the_daemon,      // broken: the next daemon takes the steps of the last one's sessions for ended
};

constexpr std::uint64_t kContent = 7, kOther = 99;
constexpr std::uint32_t kNobody = 0, kPage = 1, kOtherPage = 2;  // whom a place belongs to, by the records

std::uint64_t entry_of(std::uint32_t place) {
  return pack_entry({1, Format::dense, EntryState::sealed, place * kOffsetUnitBytes});
}

struct World {
  Word epoch{"epoch", 1}, entry{"entry", entry_of(0)}, revoked{"revoked"};
  Cell<std::uint64_t> place[3] = {Cell<std::uint64_t>{"place X", kContent}, Cell<std::uint64_t>{"place Y"},
                                  Cell<std::uint64_t>{"place Z"}};
  Slot step[1];
  // What the journal guards. Only the daemon that lives looks at it.
  struct Records {
    std::uint32_t owner[2] = {kPage, kNobody};  // of X and Y
    bool retired = false;                       // the page was given up; its place and id rest until no step is left
  } records;
};

void reader(World& w, std::uint64_t steps) {
  for (std::uint64_t serial = 1; serial <= steps; ++serial) {
    begin_step<M>(w.step[0], serial, w.epoch, w.revoked);
    const Entry e = unpack_entry(load_entry<M>(w.entry));
    expect(e.state == EntryState::sealed, "a step meets a freed entry");
    expect(M::read(w.place[e.offset_bytes / kOffsetUnitBytes]) == kContent, "a step reads the bytes of another page");
    end_step<M>(w.step[0], serial);
  }
}

class Daemon {
 public:
  Daemon(World& w, Rule broken) : w_(w), broken_(broken) {}

  // X -> Y, then what is left over is given to another page.
  void move() {
    M::write(w_.place[1], kContent);
    publish_entry<M>(w_.entry, entry_of(1));
    Machine::current().may_die();  // the new entry is out, the move not committed
    w_.records.owner[1] = kPage;
    w_.records.owner[0] = kNobody;
    Machine::current().may_die();
    retire(0);
    advance();
    reap();
    reap();
  }

  // The page is given up: nobody holds it, but steps that began before may read it.
  void give_up() {
    w_.records.retired = true;
    Machine::current().may_die();
    retire(0);
    advance();
    reap();
  }

  void adopt(bool moves_on = false) {
    if (broken_ == Rule::epoch_goes_on) M::store(w_.epoch, 1, std::memory_order_release, Site::plain);
    for (std::uint32_t place = 0; place < 2; ++place) {
      const bool named = w_.records.owner[place] == kPage;
      if (named && broken_ != Rule::entries_are_written_anew) {
        publish_entry<M>(w_.entry, broken_ == Rule::retired_pages_keep_their_entry && w_.records.retired
                                       ? pack_entry({2, Format::none, EntryState::free, 0})
                                       : entry_of(place));
      }
      if (named ? !w_.records.retired : w_.records.owner[place] != kNobody) continue;
      if (broken_ == Rule::unnamed_places_rest_in_limbo || (broken_ == Rule::every_unnamed_place_rests && place == 1)) {
        give(place);
      } else {
        retire(place);
      }
    }
    if (moves_on) {  // to Z, from where the record says that it is
      M::write(w_.place[2], kContent);
      publish_entry<M>(w_.entry, entry_of(2));
      retire(w_.records.owner[0] == kPage ? 0 : 1);
    }
    if (broken_ != Rule::advance_before_scan) advance();
    reap();
    reap();
  }

 private:
  std::uint64_t epoch() const { return M::load(w_.epoch, std::memory_order_relaxed, Site::plain); }
  void retire(std::uint32_t place) { limbo_.retire({.slot = {SlabId{0}, SlotIndex{place}}, .tag = Epoch{epoch()}}); }
  void advance() { advance_epoch<M>(w_.epoch); }
  void give(std::uint32_t place) {
    w_.records.owner[place] = kOtherPage;
    M::write(w_.place[place], kOther);
  }
  void reap() {
    const Epoch current{epoch()};
    const bool forgets = broken_ == Rule::clients_outlive_the_daemon;
    limbo_.reap(forgets ? Epoch{raw(current) + 1} : oldest_open<M>(w_.step, current),
                [this](const Retired& item) { give(raw(item.slot.slot)); });
  }

  World& w_;
  const Rule broken_;
  Limbo limbo_;
};

Machine::Scenario killed_in_a_move(std::uint64_t steps, Rule broken = Rule::kept) {
  return [=](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("reader", [=] { reader(*w, steps); });
    m.mortal(
        "daemon", [=] { Daemon(*w, Rule::kept).move(); }, [=] { Daemon(*w, broken).adopt(); });
  };
}

Machine::Scenario moved_on_after_a_kill(Rule broken = Rule::kept) {
  return [=](Machine& m) {
    const auto w = std::make_shared<World>();
    m.thread("reader", [=] { reader(*w, 1); });
    m.mortal(
        "daemon", [=] { Daemon(*w, Rule::kept).move(); }, [=] { Daemon(*w, broken).adopt(true); });
  };
}

// One step, begun while the page was still held: the daemon gives it up on a command of this session.
Machine::Scenario killed_in_a_release(Rule broken = Rule::kept) {
  return [=](Machine& m) {
    const auto w = std::make_shared<World>();
    const auto released = std::make_shared<Word>("command");
    m.thread("reader", [=] {
      begin_step<M>(w->step[0], 1, w->epoch, w->revoked);
      M::store(*released, 1, std::memory_order_release, Site::plain);
      expect(unpack_entry(load_entry<M>(w->entry)).state == EntryState::sealed, "a step meets a freed entry");
      expect(M::read(w->place[0]) == kContent, "a step reads the bytes of another page");
      end_step<M>(w->step[0], 1);
    });
    m.mortal(
        "daemon",
        [=] {
          if (M::load(*released, std::memory_order_acquire, Site::plain) == 1) Daemon(*w, Rule::kept).give_up();
        },
        [=] { Daemon(*w, broken).adopt(); });
  };
}

TEST(Adoption, OfADaemonThatIsKilledAnywhereInAMove) { holds(killed_in_a_move(1)); }
TEST(Adoption, OfADaemonThatIsKilledAnywhereInAMoveAgainstTwoSteps) { holds(killed_in_a_move(2)); }
TEST(Adoption, OfADaemonThatIsKilledAnywhereInAMoveThatTheNextOneGoesOnFrom) { holds(moved_on_after_a_kill()); }
TEST(Adoption, OfADaemonThatIsKilledAnywhereInARelease) { holds(killed_in_a_release()); }

class AdoptionWithout : public testing::TestWithParam<Site> {};
TEST_P(AdoptionWithout, Fails) { fails("race", killed_in_a_move(2), GetParam()); }
INSTANTIATE_TEST_SUITE_P(, AdoptionWithout, testing::ValuesIn(kAdoptionSites), site_of);

TEST(AdoptionRules, Fail) {
  for (const Rule rule :
       {Rule::unnamed_places_rest_in_limbo, Rule::every_unnamed_place_rests, Rule::entries_are_written_anew,
        Rule::advance_before_scan, Rule::clients_outlive_the_daemon}) {
    fails("race", killed_in_a_move(2, rule));
  }
  fails("race", moved_on_after_a_kill(Rule::epoch_goes_on));
  fails("a freed entry", killed_in_a_release(Rule::retired_pages_keep_their_entry));
  fails("may still read it", killed_in_a_release(Rule::clients_outlive_the_daemon));
}

}  // namespace
}  // namespace kvq::model
