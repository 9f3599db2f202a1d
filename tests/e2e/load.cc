// A model server that keeps a kvqd busy: opens documents, some of them again and again, and writes what is not cached.
// usage: kvq_load SOCKET STREAM [TURNS_PER_SECOND]
//
// Invariant: it ends when it is killed or its input ends. A kvqd that goes away is waited for.
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>

#include "tests/support/tiny_model.h"

namespace {

using namespace kvq;
using namespace kvq::test;

constexpr std::size_t kDocument = 640, kHeld = 6;
constexpr std::uint32_t kDocuments = 120, kReserveMs = 2000;

// Turns until kvqd fails this server; true: the input ended.
bool serve(const std::string& socket, std::uint32_t stream, int turn_ms, std::mt19937& random) {
  const std::string label = "server " + std::to_string(stream);
  TinyModel tiny(socket, {.fingerprint = 7, .credits = 8, .label = label.c_str()});
  std::deque<Sequence> held;
  for (;;) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, turn_ms) > 0) return true;
    const std::uint32_t document =
        std::min(random() % kDocuments, random() % kDocuments);  // the first are asked for most
    const auto tokens = token_stream(stream * 1000 + document, kDocument);
    std::uint64_t cached = 0;
    if (held.size() >= kHeld) held.pop_front();
    held.push_back(tiny.model().open(tokens, &cached));
    const std::vector<std::uint32_t> rest(tokens.begin() + static_cast<std::ptrdiff_t>(cached), tokens.end());
    if (!rest.empty()) tiny.write(held.back(), cached, rest, kReserveMs);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: kvq_load SOCKET STREAM [TURNS_PER_SECOND]\n");
    return 2;
  }
  const auto stream = static_cast<std::uint32_t>(std::atoi(argv[2]));
  const int turn_ms = 1000 / std::max(1, argc > 3 ? std::atoi(argv[3]) : 20);
  std::mt19937 random(stream);
  for (;;) {
    try {
      if (serve(argv[1], stream, turn_ms, random)) return 0;
    } catch (const std::exception&) {  // no room in time, or no kvqd
      pollfd input{STDIN_FILENO, POLLIN, 0};
      if (::poll(&input, 1, 100) > 0) return 0;
    }
  }
}
