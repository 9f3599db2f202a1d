// The machine: threads of the real protocol code on words of weak memory, every schedule and every value tried.
//
// Invariant: a run is a function of its choices (who goes next, which message a load returns, whether a process dies
// here), so a run can be played again and the tree of choices be searched depth first. What a thread does depends only
// on what it read and on its own variables: threads share words and cells and nothing else. A state that was met before
// is not searched again; a state is memory, each thread's views, and each thread's history of values read.
//
// Memory is views over messages, as in the operational models of C++'s release-acquire memory: a load may return any
// message of a word that is not older than what its thread knows; release, acquire and fences pass on what a thread
// knows. Each word has one writer at a time (checked), so a new message is always the newest. Cells are plain bytes:
// two accesses of which one is a write must be ordered by happens-before, or the run fails. Stores never overtake
// earlier loads here.
#pragma once

#include <atomic>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "kvq/memory_site.h"
#include "tests/epochs/fiber.h"
#include "tests/epochs/view.h"

namespace kvq::model {

struct Report {
  std::uint64_t executions = 0, states = 0;
  std::set<std::uint64_t> ends;  // states in which every thread has come to its end
  std::string failure;           // empty: none; otherwise what went wrong and the run that led there, line by line
};

class Machine {
 public:
  using Body = std::function<void()>;
  using Scenario = std::function<void(Machine&)>;

  // `off`: this fence is no fence, this access is relaxed. `every_path`: states that were met before are searched
  // again.
  static Report explore(const Scenario& scenario, Site off = Site::plain, bool every_path = false);
  static Machine& current() { return *current_; }

  // --- for scenarios ---
  void thread(std::string name, Body body) { add_thread(std::move(name), std::move(body), nullptr); }
  // One that may be killed before any of its accesses; then `after_death` runs, knowing all that it did, as who waits
  // for a process does.
  void mortal(std::string name, Body body, Body after_death) {
    add_thread(std::move(name), std::move(body), std::move(after_death));
  }
  // One more place where the process may be killed: where it changes what only it and its successor read.
  void may_die() { maybe_die(); }
  void expect(bool holds, const char* what) {
    if (!holds) fail(what);
  }

  // --- for words and cells ---
  std::size_t add_word(const char* name, std::uint64_t value);
  std::size_t add_cell(const char* name, std::uint64_t value);
  std::uint64_t load(std::size_t word, std::memory_order order, Site site);
  void store(std::size_t word, std::uint64_t value, std::memory_order order, Site site);
  void fence(std::memory_order order, Site site);
  std::uint64_t read(std::size_t cell);
  void write(std::size_t cell, std::uint64_t value);

 private:
  struct Stopped {};  // thrown through a fiber whose run is over
  struct Died {};     // thrown through a process that is killed
  struct Message {
    std::uint64_t value;
    View view;
  };
  struct WordState {
    const char* name;
    std::vector<Message> messages;
  };
  struct CellState {
    const char* name;
    std::uint64_t value = 0;
    std::size_t writer = 0;
    std::uint8_t written = 0;                         // the writer's clock
    std::array<std::uint8_t, kMaxThreads> read_at{};  // each reader's clock
  };
  struct Thread {
    std::string name;
    Body body, after_death;
    View now, acquired, released;  // released within acquired: now <= acquired, released <= now
    std::uint64_t history = 0;
    bool alive = true, started = false, entered = false, done = false;
  };
  struct Choice {
    std::uint32_t taken, count;
  };

  void add_thread(std::string name, Body body, Body after_death);
  void run(const Scenario& scenario);
  void run_thread(std::size_t index);
  void call(const Body& body, bool* died);
  void leave(std::size_t index);
  bool next_run();
  bool is_known();
  std::uint32_t choose(std::uint32_t count);
  void point();
  void maybe_die();
  void switch_to(std::size_t index);
  std::uint64_t state() const;
  [[noreturn]] void fail(std::string what);
  void note(const std::string& line);
  void remember(std::uint64_t value);
  std::memory_order effective(std::memory_order order, Site site) const;
  Thread& self() { return threads_[running_]; }

  static Machine* current_;
  static constexpr std::size_t kMain = ~std::size_t{0};

  Site off_ = Site::plain;
  std::vector<Thread> threads_;
  std::vector<WordState> words_;
  std::vector<CellState> cells_;
  View fences_;  // what fences in seq_cst order have told
  std::array<Fiber, kMaxThreads> fibers_;
  ucontext_t main_{};
  std::size_t running_ = 0;

  std::vector<Choice> choices_;
  std::size_t depth_ = 0;
  std::unordered_set<std::uint64_t> visited_;
  std::set<std::uint64_t> ends_;
  bool stopping_ = false, recording_ = false, every_path_ = false;
  std::string failure_, trace_;
};

// A word that the model's processes share, and bytes that they share.
class Word {
 public:
  explicit Word(const char* name, std::uint64_t value = 0) : index_(Machine::current().add_word(name, value)) {}
  Word(const Word&) = delete;
  Word& operator=(const Word&) = delete;
  std::size_t index() const { return index_; }

 private:
  std::size_t index_;
};

template <typename T>
class Cell {
 public:
  explicit Cell(const char* name = "item", T value = {}) : index_(Machine::current().add_cell(name, pack(value))) {}
  Cell(const Cell&) = delete;
  Cell& operator=(const Cell&) = delete;
  std::size_t index() const { return index_; }
  static std::uint64_t pack(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    return word;
  }
  static T unpack(std::uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }

 private:
  std::size_t index_;
};

// The memory policy of kvq/memory_site.h on the machine that runs.
struct ModelMemory {
  static std::uint64_t load(const Word& word, std::memory_order order, Site site) {
    return Machine::current().load(word.index(), order, site);
  }
  static void store(Word& word, std::uint64_t value, std::memory_order order, Site site) {
    Machine::current().store(word.index(), value, order, site);
  }
  static void fence(std::memory_order order, Site site) { Machine::current().fence(order, site); }
  template <typename T>
  static void write(Cell<T>& cell, const std::type_identity_t<T>& value) {
    Machine::current().write(cell.index(), Cell<T>::pack(value));
  }
  template <typename T>
  static T read(const Cell<T>& cell) {
    return Cell<T>::unpack(Machine::current().read(cell.index()));
  }
};

}  // namespace kvq::model
