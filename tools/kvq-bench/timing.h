// How long something takes.
//
// Invariant: a median of at least kLeastRounds rounds after one that is not counted, so that neither a page fault nor a
// neighbour decides.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace kvq_bench {

inline constexpr std::size_t kLeastRounds = 5;

inline double seconds_since(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

// Seconds of each round of `body`, in order of length, for `budget_s` in all.
template <typename Body>
std::vector<double> rounds(double budget_s, Body body) {
  body();
  std::vector<double> out;
  const auto begin = std::chrono::steady_clock::now();
  while (out.size() < kLeastRounds || seconds_since(begin) < budget_s) {
    const auto then = std::chrono::steady_clock::now();
    body();
    out.push_back(seconds_since(then));
  }
  std::sort(out.begin(), out.end());
  return out;
}

template <typename Body>
double median_seconds(double budget_s, Body body) {
  const std::vector<double> all = rounds(budget_s, body);
  return all[all.size() / 2];
}

// A plain copy of `bytes`, split over `threads` threads.
inline double copy_seconds(std::size_t bytes, unsigned threads, double budget_s) {
  std::vector<char> from(bytes, 1), to(bytes);
  std::barrier turn(threads);
  bool ends = false;  // written between two turns
  const auto part = [&](unsigned i) {
    const std::size_t begin = bytes / threads * i, end = i + 1 == threads ? bytes : bytes / threads * (i + 1);
    std::memcpy(to.data() + begin, from.data() + begin, end - begin);
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) {
    others.emplace_back([&, i] {
      for (;;) {
        turn.arrive_and_wait();
        if (ends) return;
        part(i);
        turn.arrive_and_wait();
      }
    });
  }
  const double median = median_seconds(budget_s, [&] {
    turn.arrive_and_wait();
    part(0);
    turn.arrive_and_wait();
  });
  ends = true;
  turn.arrive_and_wait();
  for (std::thread& other : others) other.join();
  return median;
}

}  // namespace kvq_bench
