// Weak memory: what loads, stores and fences do to views, and what counts as a race.
//
// Invariant: a view that is passed on holds what its thread knew when it released it, no more.
#include <cstdio>
#include <cstdlib>

#include "tests/epochs/machine.h"
#include "tests/epochs/site_names.h"

namespace kvq::model {
namespace {

bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_seq_cst || order == std::memory_order_acq_rel;
}
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_seq_cst || order == std::memory_order_acq_rel;
}
const char* name_of(std::memory_order order) {
  switch (order) {
    case std::memory_order_relaxed:
      return "relaxed";
    case std::memory_order_acquire:
      return "acquire";
    case std::memory_order_release:
      return "release";
    default:
      return "seq_cst";
  }
}
std::string how(std::memory_order order, Site site) {
  const std::string at = name(site);
  return " (" + std::string(name_of(order)) + (at.empty() ? ")" : ", " + at + ")");
}
std::string number(std::uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, value < 10000 ? "%llu" : "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

std::size_t Machine::add_word(const char* name, std::uint64_t value) {
  if (words_.size() == kMaxWords) std::abort();
  words_.push_back({name, {{value, View{}}}});
  return words_.size() - 1;
}

std::size_t Machine::add_cell(const char* name, std::uint64_t value) {
  cells_.push_back({.name = name, .value = value, .written = 1});
  return cells_.size() - 1;
}

std::memory_order Machine::effective(std::memory_order order, Site site) const {
  return site != Site::plain && site == off_ ? std::memory_order_relaxed : order;
}

std::uint64_t Machine::load(std::size_t word, std::memory_order order, Site site) {
  point();
  order = effective(order, site);
  Thread& t = self();
  const std::vector<Message>& messages = words_[word].messages;
  const std::uint32_t newest = static_cast<std::uint32_t>(messages.size() - 1);
  const std::uint32_t age = choose(newest - t.now.message[word] + 1);
  const Message& m = messages[newest - age];
  const auto index = static_cast<std::uint8_t>(newest - age);
  t.now.message[word] = index;
  t.acquired.message[word] = std::max(t.acquired.message[word], index);
  t.acquired.join(m.view);
  if (acquires(order)) t.now.join(m.view);
  remember(m.value);
  if (recording_) {
    note("loads   " + std::string(words_[word].name) + " = " + number(m.value) + how(order, site) +
         (age == 0 ? "" : ", which is " + number(messages.back().value) + " by now"));
  }
  return m.value;
}

void Machine::store(std::size_t word, std::uint64_t value, std::memory_order order, Site site) {
  point();
  order = effective(order, site);
  Thread& t = self();
  std::vector<Message>& messages = words_[word].messages;
  if (t.now.message[word] + 1u != messages.size()) fail(std::string("two writers of ") + words_[word].name);
  if (messages.size() == 255) std::abort();
  const auto index = static_cast<std::uint8_t>(messages.size());
  t.now.message[word] = t.acquired.message[word] = index;
  Message m{value, releases(order) ? t.now : t.released};
  m.view.message[word] = index;
  messages.push_back(m);
  if (releases(order) && running_ != 0) t.acquired.clock[running_] = ++t.now.clock[running_];
  remember(1);
  if (recording_) note("stores  " + std::string(words_[word].name) + " = " + number(value) + how(order, site));
}

// Fences that are not seq_cst concern their own thread alone, so nobody need go between.
void Machine::fence(std::memory_order order, Site site) {
  if (effective(order, site) == std::memory_order_relaxed) return;
  if (order == std::memory_order_seq_cst) point();
  Thread& t = self();
  if (acquires(order)) t.now = t.acquired;
  if (order == std::memory_order_seq_cst) {
    t.now.join_messages(fences_);
    fences_.join_messages(t.now);
    t.acquired = t.now;
  }
  if (releases(order)) {
    t.released = t.now;
    if (running_ != 0) t.acquired.clock[running_] = ++t.now.clock[running_];
  }
  remember(2);
  if (recording_) note("fences " + how(order, site));
}

std::uint64_t Machine::read(std::size_t cell) {
  if (stopping_) throw Stopped{};
  maybe_die();
  CellState& c = cells_[cell];
  Thread& t = self();
  if (recording_) note("reads   " + std::string(c.name) + ": " + number(c.value));
  if (t.now.clock[c.writer] < c.written) {
    fail(std::string("race: ") + t.name + " reads " + c.name + " while " + threads_[c.writer].name + " writes it");
  }
  c.read_at[running_] = t.now.clock[running_];
  remember(c.value);
  return c.value;
}

void Machine::write(std::size_t cell, std::uint64_t value) {
  if (stopping_) throw Stopped{};
  maybe_die();
  CellState& c = cells_[cell];
  Thread& t = self();
  if (recording_) note("writes  " + std::string(c.name) + ": " + number(value));
  if (t.now.clock[c.writer] < c.written) {
    fail(std::string("race: ") + t.name + " writes " + c.name + " while " + threads_[c.writer].name + " writes it");
  }
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    if (t.now.clock[i] >= c.read_at[i]) continue;
    fail(std::string("race: ") + t.name + " writes " + c.name + " while " + threads_[i].name + " may still read it");
  }
  c.value = value;
  c.writer = running_;
  c.written = t.now.clock[running_];
  c.read_at = {};
  remember(3);
}

void Machine::remember(std::uint64_t value) {
  Hash h;
  h.add(self().history);
  h.add(value);
  self().history = h.value();
}

void Machine::note(const std::string& line) {
  if (recording_)
    trace_ +=
        "  " + self().name + std::string(self().name.size() < 10 ? 10 - self().name.size() : 1, ' ') + line + "\n";
}

std::uint64_t Machine::state() const {
  Hash h;
  for (const Thread& t : threads_) {
    h.add(t.history);
    h.add(t.now);
    h.add(t.acquired);
    h.add(t.released);
  }
  for (const WordState& w : words_) {
    h.add(w.messages.size());
    for (const Message& m : w.messages) {
      h.add(m.value);
      h.add(m.view);
    }
  }
  for (const CellState& c : cells_) {
    h.add(c.value);
    h.add((std::uint64_t{c.writer} << 8) | c.written);
    std::uint64_t reads = 0;
    std::memcpy(&reads, c.read_at.data(), sizeof reads);
    h.add(reads);
  }
  h.add(fences_);
  return h.value();
}

}  // namespace kvq::model
