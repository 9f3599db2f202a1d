// What the tests of coming back share.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "kvq/kvq.hpp"

namespace kvq::test {

inline constexpr const char* kStartedAnew = "kvqd started anew: close the model and register again";

// Until the model's pressure says so; throws after 20 seconds.
template <typename Done>
void await_pressure(kvq_model* model, Done done) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (;;) {
    kvq_pressure now{};
    now.size = sizeof(now);
    check(kvq_get_pressure(model, &now));
    if (done(now)) return;
    if (std::chrono::steady_clock::now() > until) throw std::runtime_error("the pressure words do not change");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // shared memory has no event for a reader
  }
}
inline void await_away(kvq_model* model) {
  await_pressure(model, [](const kvq_pressure& p) { return p.reconnecting != 0; });
}
inline void await_back(kvq_model* model, std::uint32_t reconnects) {
  await_pressure(model, [&](const kvq_pressure& p) { return p.reconnects >= reconnects && p.reconnecting == 0; });
}

// A model of one layer, for tests that need no pages of the tiny one.
inline kvq_model* register_small(Client& client, std::uint32_t deadline_ms = 20'000) {
  const kvq_layer layer{1, 64, KVQ_FP16, 0, 2};
  kvq_model_desc desc{};
  desc.size = sizeof(desc);
  desc.layers = &layer;
  desc.layer_count = 1;
  desc.page_tokens = KVQ_PAGE_TOKENS;
  desc.deadline_ms = deadline_ms;
  kvq_model* model = nullptr;
  check(kvq_register_model(client.get(), &desc, &model));
  return model;
}

// Whether the notice rang within 10 seconds; it is silent afterwards.
inline bool rang(kvq_model* model) {
  int fd = -1;
  check(kvq_notice_fd(model, &fd));
  pollfd readable{fd, POLLIN, 0};
  if (::poll(&readable, 1, 10'000) != 1) return false;
  std::uint64_t count = 0;
  return ::read(fd, &count, sizeof(count)) == sizeof(count);
}

inline std::uint64_t ms_since(std::chrono::steady_clock::time_point start) {
  using std::chrono::milliseconds;
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace kvq::test
