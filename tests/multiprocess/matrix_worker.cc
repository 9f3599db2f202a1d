// A model server that does everything once, whatever dies meanwhile, and checks all that it reads.
//
// Invariant: it arms its own kill point before it says "ready", so that what it did before is whole; it ends with 0
// only when every byte was right and every call did what it must.
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <deque>
#include <memory>
#include <sstream>
#include <thread>

#include "client/abi.h"
#include "kvq/kill_point.h"
#include "tests/multiprocess/matrix.h"
#include "tests/support/accounts.h"
#include "tests/support/page_bytes.h"
#include "tests/support/role_process.h"

namespace kvq::test {
namespace {

constexpr std::uint32_t kPatienceMs = 30'000;

struct Plan {
  std::string point;
  int signal = SIGKILL;
  std::atomic<std::uint64_t> times_left{0};
  std::array<std::atomic<bool>, kKillPoints> reached{};
};
Plan plan;

[[maybe_unused]] void at_point(KillPoint point) {
  plan.reached[static_cast<std::size_t>(point)] = true;
  if (plan.point != name(point) || plan.times_left.load() == 0) return;
  if (plan.times_left.fetch_sub(1) == 1) ::kill(::getpid(), plan.signal);
}

void install() {
#if defined(KVQ_KILL_POINTS)
  kill_point_hook = at_point;
#endif
}

void check_all(TinyModel& tiny, Sequence& sequence, const std::vector<std::uint32_t>& tokens, std::uint64_t seed) {
  check_pages(tiny, sequence.block_table(), tokens);
  tiny.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(tokens.size()),
                        static_cast<std::uint32_t>(seed % kLayers), seed);
}

// Requests that come, share prefixes and go; more pages than the arena keeps dense, and than it keeps at all.
void serve(TinyModel& tiny) {
  std::deque<Sequence> open;
  for (std::uint32_t round = 0; round < kMatrixRounds; ++round) {
    const auto tokens = matrix_tokens(round % kMatrixStreams);
    std::uint64_t cached = 0;
    Sequence sequence = tiny.model().open(tokens, &cached);
    tiny.write(sequence, cached, {tokens.begin() + static_cast<std::ptrdiff_t>(cached), tokens.end()}, kPatienceMs);
    check_all(tiny, sequence, tokens, round);
    if (round % 5 == 2) {
      tiny.await_cached(tokens, 4 * KVQ_PAGE_TOKENS);
      Sequence again = tiny.model().open(tokens, &cached);
      check_pages(tiny, again.block_table(), {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(cached)});
    }
    open.push_back(std::move(sequence));
    if (open.size() > 3) open.pop_front();
  }
}

// Forks, cuts, windows, parking and credits that go back.
void edit(TinyModel& tiny) {
  auto tokens = token_stream(700, 200);
  Sequence mother = tiny.model().open(tokens);
  const std::uint64_t cached = mother.info().committed_tokens;
  tiny.write(mother, cached, {tokens.begin() + static_cast<std::ptrdiff_t>(cached), tokens.end()}, kPatienceMs);
  Sequence child = mother.fork(kPatienceMs);
  const auto own = token_stream(701, 150);
  auto all = tokens;
  all.insert(all.end(), own.begin(), own.end());
  tiny.write(child, tokens.size(), own, kPatienceMs);
  check_all(tiny, child, all, 1);
  mother.truncate(192, kPatienceMs);  // between pages
  tokens.resize(192);
  check_all(tiny, mother, tokens, 2);
  child.drop_before(130);
  check_pages(tiny, child.block_table(), all);
  mother.park();
  mother.resume(kPatienceMs);
  check_all(tiny, mother, tokens, 3);
  check(kvq_credits_request(tiny.get(), 6, kPatienceMs));
  check(kvq_credits_return(tiny.get(), 3));
  kvq_open_options alone{};
  alone.size = sizeof(alone);
  alone.private_pages = 1;
  Sequence cut = tiny.model().open({}, nullptr, &alone);
  tiny.write(cut, 0, token_stream(702, 200), kPatienceMs);
  cut.truncate(100, kPatienceMs);  // inside a sealed page
  tiny.write(cut, 100, token_stream(703, 60), kPatienceMs);
  tiny.attend_and_check(cut.block_table(), 160, 0, 4);
}

// A kvqd that dies while somebody connects says NO_DAEMON (kvq_connect); a server then comes again.
std::unique_ptr<TinyModel> come_again(const std::string& socket) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  for (;;) {
    try {
      return std::make_unique<TinyModel>(socket, ModelOptions{});
    } catch (const Failure& failure) {
      if (failure.status() != KVQ_ERR_NO_DAEMON || std::chrono::steady_clock::now() > until) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // who starts it has no event for us
    }
  }
}

// A session that comes and goes with what it holds.
void visit(const std::string& socket) {
  const auto connected = come_again(socket);
  TinyModel& guest = *connected;
  const auto tokens = matrix_tokens(1);
  std::uint64_t cached = 0;
  Sequence one = guest.model().open(tokens, &cached);
  guest.write(one, cached, {tokens.begin() + static_cast<std::ptrdiff_t>(cached), tokens.end()}, kPatienceMs);
  Sequence two = one.fork(kPatienceMs);
  check_all(guest, two, tokens, 5);
}

// Damages one byte of a page that nobody else has, and waits until the daemon says so.
void damage(TinyModel& tiny, const std::string& socket) {
  kvq_open_options alone{};
  alone.size = sizeof(alone);
  alone.private_pages = alone.format_floor_dense = 1;
  Sequence bad = tiny.model().open({}, nullptr, &alone);
  tiny.write(bad, 0, token_stream(704, 130), kPatienceMs);
  const std::int32_t page = bad.block_table()[0];
  const client::Model& inner = *tiny.get()->model;
  const auto entry = [&] { return inner.entry(PageId{static_cast<std::uint32_t>(page)}); };
  tiny.await("for a page to be sealed", [&] { return entry().state == EntryState::sealed; });
  verify_all(socket);  // from here on it has a checksum
  const std::uint64_t lost = tiny.model().pressure().lost_pages;
  inner.memory().arena()[entry().offset_bytes + 77] ^= std::byte{1};
  verify_all(socket);
  tiny.await("for a page to be lost", [&] { return tiny.model().pressure().lost_pages > lost; });
  std::int32_t pages[8] = {};
  std::uint32_t sequences[8] = {};
  std::size_t count = 0;
  std::uint64_t now = 0;
  check(kvq_lost_pages(tiny.get(), lost, pages, sequences, 8, &count, &now));
  if (count != 1 || pages[0] != page) throw std::runtime_error("another page than the damaged one is called lost");
}

}  // namespace

std::vector<std::uint32_t> matrix_tokens(std::uint32_t stream) {
  return token_stream(10 + stream, 4 * KVQ_PAGE_TOKENS + 20);
}

// Arguments: socket, point or "-", how many times it is passed, kill or stop.
KVQ_ROLE(matrix_worker) {
  plan.point = arguments[1];
  plan.signal = arguments[3] == "stop" ? SIGSTOP : SIGKILL;
  install();
  TinyModel tiny(arguments[0], {});
  const auto tokens = token_stream(2, 300);
  Sequence base = tiny.model().open({});
  tiny.write(base, 0, tokens, kPatienceMs);
  plan.times_left = std::stoull(arguments[2]);
  say("ready");
  hear();
  check_all(tiny, base, tokens, 0);
  serve(tiny);
  visit(arguments[0]);
  edit(tiny);
  damage(tiny, arguments[0]);
  check_all(tiny, base, tokens, 6);
  tiny.await("for the connection", [&] { return tiny.model().pressure().reconnecting == 0; });
  std::ostringstream reached;
  for (std::size_t i = 0; i < kKillPoints; ++i) {
    if (plan.reached[i]) reached << name(static_cast<KillPoint>(i)) << " ";
  }
  say("done " + reached.str());
  hear();
  check_all(tiny, base, tokens, 7);
  return 0;
}

}  // namespace kvq::test
