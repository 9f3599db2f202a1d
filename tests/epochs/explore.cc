// The search: runs the scenario again and again, each time with the next sequence of choices.
//
// Invariant: choices are replayed up to the one that changed; from there on the first alternative is taken, and every
// state is looked up. A stopped run unwinds its fibers, since their stacks own things.
#include <cstdlib>
#include <utility>

#include "tests/epochs/machine.h"

namespace kvq::model {
namespace {

constexpr std::size_t kMostChoices = 2000;  // a scenario that loops for ever

}  // namespace

Machine* Machine::current_ = nullptr;

Report Machine::explore(const Scenario& scenario, Site off, bool every_path) {
  Machine machine;
  machine.off_ = off;
  machine.every_path_ = every_path;
  current_ = &machine;
  Report report;
  do {
    machine.run(scenario);
    ++report.executions;
  } while (machine.failure_.empty() && machine.next_run());
  report.states = machine.visited_.size();
  report.ends = std::move(machine.ends_);
  if (!machine.failure_.empty()) {  // once more, this time told line by line
    machine.recording_ = true;
    machine.run(scenario);
    report.failure = machine.failure_ + "\n" + machine.trace_;
  }
  current_ = nullptr;
  return report;
}

void Machine::add_thread(std::string name, Body body, Body after_death) {
  if (threads_.size() == kMaxThreads) std::abort();
  Thread t;
  t.name = std::move(name);
  t.body = std::move(body);
  t.after_death = std::move(after_death);
  threads_.push_back(std::move(t));
}

void Machine::run(const Scenario& scenario) {
  threads_.clear();
  words_.clear();
  cells_.clear();
  fences_ = View{};
  depth_ = 0;
  stopping_ = false;
  failure_.clear();
  trace_.clear();
  add_thread("setup", nullptr, nullptr);
  running_ = 0;
  threads_[0].now.clock[0] = 1;
  scenario(*this);
  threads_[0].done = true;
  for (std::size_t i = 1; i < threads_.size(); ++i) {
    Thread& t = threads_[i];
    t.now = t.acquired = threads_[0].now;  // threads start after memory is set up
    t.now.clock[i] = t.acquired.clock[i] = 1;
    fibers_[i].start([this, i] { run_thread(i); });
  }
  running_ = kMain;
  switch_to(1 + choose(static_cast<std::uint32_t>(threads_.size() - 1)));
  for (std::size_t i = 1; i < threads_.size(); ++i) {
    if (threads_[i].started && !threads_[i].done) switch_to(i);  // stopped: it unwinds
  }
  if (!stopping_) ends_.insert(state());
  threads_.clear();  // with the scenario's world
}

// Depth first: the last choice that has an alternative left takes it.
bool Machine::next_run() {
  while (!choices_.empty()) {
    Choice& last = choices_.back();
    if (++last.taken < last.count) return true;
    choices_.pop_back();
  }
  return false;
}

std::uint32_t Machine::choose(std::uint32_t count) {
  if (count == 1) return 0;
  if (depth_ == choices_.size()) {
    if (depth_ == kMostChoices) std::abort();
    choices_.push_back({0, count});
  }
  const Choice choice = choices_[depth_++];
  if (choice.count != count) std::abort();  // the scenario is not a function of its choices
  return choice.taken;
}

void Machine::run_thread(std::size_t index) {
  threads_[index].started = true;
  bool died = false;
  call(threads_[index].body, &died);
  if (died) {
    threads_[index].alive = false;
    call(threads_[index].after_death, &died);
  }
  leave(index);
}

// No switch happens inside a handler: what the C++ run time keeps of exceptions belongs to the system thread.
void Machine::call(const Body& body, bool* died) {
  try {
    body();
  } catch (const Died&) {
    *died = true;
  } catch (const Stopped&) {
  }
}

void Machine::leave(std::size_t index) {
  threads_[index].done = true;
  std::vector<std::size_t> others;
  for (std::size_t i = 1; i < threads_.size() && !stopping_; ++i) {
    if (!threads_[i].done) others.push_back(i);
  }
  if (others.empty()) {
    switch_to(kMain);
  } else {
    switch_to(others[choose(static_cast<std::uint32_t>(others.size()))]);
  }
}

void Machine::switch_to(std::size_t index) {
  ucontext_t& from = running_ == kMain ? main_ : fibers_[running_].context();
  running_ = index;
  Fiber::switch_to(from, index == kMain ? main_ : fibers_[index].context());
}

// Asked only beyond what is played again.
bool Machine::is_known() {
  return depth_ == choices_.size() && !visited_.insert(state()).second && !recording_ && !every_path_;
}

// Before each access that others can see: any thread may come first.
void Machine::point() {
  if (running_ == 0) return;
  if (stopping_) throw Stopped{};
  if (!std::exchange(self().entered, true)) return maybe_die();  // it was chosen to make its first access
  if (is_known()) {
    stopping_ = true;
    throw Stopped{};
  }
  std::array<std::size_t, kMaxThreads> ready{running_};
  std::uint32_t count = 1;
  for (std::size_t i = 1; i < threads_.size(); ++i) {
    if (i != running_ && !threads_[i].done) ready[count++] = i;
  }
  const std::size_t next = ready[choose(count)];
  if (next != running_) switch_to(next);
  if (stopping_) throw Stopped{};
  maybe_die();
}

void Machine::maybe_die() {
  if (running_ == 0 || self().after_death == nullptr || !self().alive) return;
  const std::uint32_t dies = choose(2);
  remember(dies);
  if (dies == 0) return;
  note("is killed");
  throw Died{};
}

void Machine::fail(std::string what) {
  failure_ = std::move(what);
  stopping_ = true;
  throw Stopped{};
}

}  // namespace kvq::model
