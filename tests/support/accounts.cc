// Invariant: each look uses a connection of its own, which is gone before descriptors are counted.
#include "tests/support/accounts.h"

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "tests/support/raw_session.h"

namespace kvq::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint32_t kGlobalFiles = 8, kFilesOfTenant = 3;

template <typename Body>
void over_deaths(Body body) {
  for (const auto until = Clock::now() + std::chrono::seconds(30);;) {
    try {
      return body();
    } catch (const std::exception&) {
      if (Clock::now() > until) throw;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // a daemon that comes back says nothing to strangers
  }
}

std::string what_is_left(const std::string& socket) {
  const std::string text = RawSession(socket).status();
  if (text.empty()) return "kvqd does not answer";
  const auto status = nlohmann::json::parse(text);
  bool left = status["sessions"] != 0 || status["limbo_slots"] != 0 || status["arena"]["slabs_used"] != 0 ||
              status["parked_requests"] != 0 || status["transcodes"]["in_flight"] != 0;
  for (const auto& tenant : status["tenants"]) {
    left |= tenant["sessions"] != 0 || tenant["slab_bytes"] != 0 || tenant["page_bytes"] != 0 ||
            tenant["limbo_bytes"] != 0 || tenant["open_pages"] != 0 || tenant["sealed_pages"] != 0;
  }
  return left ? text : "";
}

}  // namespace

void operate(const std::string& socket, const std::string& key, const std::string& value) {
  over_deaths([&] { RawSession(socket).set(key, value); });
}

void verify_all(const std::string& socket) {
  over_deaths([&] { RawSession(socket).verify(); });
}

std::uint32_t open_descriptors(pid_t process) {
  std::uint32_t n = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/fd"))
    ++n;
  return n;
}

Books::Books(const HeldDaemon& daemon, std::uint32_t tenants, bool gpu)
    : daemon_(daemon), held_(kGlobalFiles + kFilesOfTenant * tenants + (gpu ? 1 + tenants : 0)), open_(0) {
  const auto until = Clock::now() + std::chrono::seconds(20);  // the holder reads what kvqd has sent in its own time
  while (daemon.descriptors_held() != held_ && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (daemon.descriptors_held() != held_) {
    throw std::runtime_error("the holder begins with " + std::to_string(daemon.descriptors_held()) +
                             " descriptors, not " + std::to_string(held_));
  }
  open_ = open_descriptors(daemon.pid());
}

std::string Books::close() const {
  operate(daemon_.socket(), "relief", "0.005");
  operate(daemon_.socket(), "quantize_at", "0.01");
  operate(daemon_.socket(), "evict_at", "0.01");
  std::string left = "nothing was looked at";
  for (const auto until = Clock::now() + std::chrono::seconds(20); !left.empty() && Clock::now() < until;) {
    left = what_is_left(daemon_.socket());
    const std::uint32_t held = daemon_.descriptors_held(), open = open_descriptors(daemon_.pid());
    if (left.empty() && held != held_)
      left = "the holder has " + std::to_string(held) + " descriptors, not " + std::to_string(held_);
    if (left.empty() && open != open_)
      left = "kvqd has " + std::to_string(open) + " descriptors open, not " + std::to_string(open_);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the daemon's tick
  }
  return left;
}

}  // namespace kvq::test
