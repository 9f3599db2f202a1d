// A model server that does whatever its seed says until it is told to end, and checks every byte that it reads.
//
// Invariant: only errors that memory, drains and deaths of the daemon bring are passed over, and counted; a wrong byte,
// and any other error, ends it with 1.
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <optional>
#include <random>
#include <sstream>

#include "kvq/kill_point.h"
#include "tests/support/page_bytes.h"
#include "tests/support/role_process.h"

namespace kvq::test {
namespace {

std::string wanted_point;
std::atomic<std::uint64_t> times_left{0};

[[maybe_unused]] void at_point(KillPoint point) {
  if (times_left.load() == 0 || wanted_point != name(point)) return;
  if (times_left.fetch_sub(1) == 1) ::kill(::getpid(), SIGKILL);
}

struct Request {
  Sequence sequence;
  std::vector<std::uint32_t> tokens;
  bool rounded = false;  // it may hold values of a quantized page that was cut
};

class Server {
 public:
  Server(std::string socket, std::uint64_t seed) : socket_(std::move(socket)), random_(seed) {}

  void act() {
    try {
      if (!tiny_) {
        ModelOptions options;
        options.credits = static_cast<std::uint32_t>(below(6));
        tiny_.emplace(socket_, options);
      }
      one_act();
      ++acts_;
    } catch (const Failure& failure) {
      ++failures_[kvq_status_name(failure.status())];
      switch (failure.status()) {
        case KVQ_ERR_NO_MEMORY:
        case KVQ_ERR_OVER_QUOTA:
        case KVQ_ERR_LIMIT_REACHED:
          return;
        case KVQ_ERR_DAEMON_GONE:
        case KVQ_ERR_NO_DAEMON:
          return leave();  // perhaps it only takes long; a new start is right in both cases
        default:
          throw;
      }
    }
  }

  void leave() {
    open_.clear();
    tiny_.reset();
  }

  std::string report() const {
    std::ostringstream out;
    out << acts_ << " acts " << pages_.dense << " dense " << pages_.quantized << " quantized";
    for (const auto& [name, n] : failures_) out << " " << n << " " << name;
    return out.str();
  }

 private:
  std::uint64_t below(std::uint64_t n) { return random_() % n; }

  void one_act() {
    const std::uint64_t what = below(32);
    if (open_.empty() || (what < 4 && open_.size() < 6)) return open();
    Request& one = open_[below(open_.size())];
    if (what < 14) return write(one);
    if (what < 16) return cut(one);
    if (what < 18 && open_.size() < 6) return fork(one);
    if (what < 27) return look(one);
    if (what < 29) return release(one);
    if (what == 29) return park(one);
    if (what == 30) return credits();
    if (below(8) == 0) return leave();
    const Step step(tiny_->model());  // a pass that takes its time
    ::usleep(static_cast<useconds_t>(below(20'000)));
    look(one);
  }

  void open() {
    Request one;
    one.tokens = token_stream(static_cast<std::uint32_t>(below(8)), (1 + below(5)) * KVQ_PAGE_TOKENS + below(64));
    kvq_open_options options{};
    options.size = sizeof(options);
    options.private_pages = one.rounded = below(8) == 0;
    options.format_floor_dense = below(16) == 0;
    std::uint64_t cached = 0;
    one.sequence = tiny_->model().open(one.tokens, &cached, &options);
    one.tokens.resize(cached);
    open_.push_back(std::move(one));
    look(open_.back());
  }

  void write(Request& one) {
    if (one.tokens.size() > 500) return release(one);
    const auto stream = token_stream(static_cast<std::uint32_t>(below(16) == 0 ? 100 + below(3) : stream_of(one)), 700);
    const std::vector<std::uint32_t> more(
        stream.begin() + static_cast<std::ptrdiff_t>(one.tokens.size()),
        stream.begin() + static_cast<std::ptrdiff_t>(one.tokens.size() + 1 + below(100)));
    tiny_->write(one.sequence, one.tokens.size(), more, static_cast<std::uint32_t>(below(2000)));
    one.tokens.insert(one.tokens.end(), more.begin(), more.end());
  }

  // The stream that its tokens go on with, so that sequences of different servers have the same pages.
  std::uint64_t stream_of(const Request& one) {
    for (std::uint32_t stream = 0; stream < 8 && !one.tokens.empty(); ++stream) {
      if (token_stream(stream, one.tokens.size()).back() == one.tokens.back()) return stream;
    }
    return below(8);
  }

  void cut(Request& one) {
    std::uint64_t at = below(one.tokens.size() + 1);
    if (!one.rounded) at -= at % KVQ_PAGE_TOKENS;
    one.sequence.truncate(at, 1000);
    one.tokens.resize(at);
  }

  void fork(Request& one) {
    Request child;
    child.sequence = one.sequence.fork(1000);
    child.tokens = one.tokens;
    child.rounded = one.rounded;
    open_.push_back(std::move(child));
  }

  void look(Request& one) {
    if (one.tokens.empty()) return;
    const auto table = one.sequence.block_table();
    if (!one.rounded) {
      const Formats seen = check_pages(*tiny_, table, one.tokens);
      pages_.dense += seen.dense;
      pages_.quantized += seen.quantized;
    }
    if (below(4) != 0) return;
    tiny_->attend_and_check(table, static_cast<std::int32_t>(one.tokens.size()),
                            static_cast<std::uint32_t>(below(kLayers)), random_());
  }

  void release(Request& one) {
    std::swap(one, open_.back());
    open_.pop_back();
  }

  void park(Request& one) {
    one.sequence.park();
    ::usleep(static_cast<useconds_t>(below(20'000)));
    try {
      one.sequence.resume(2000);
    } catch (const Failure&) {
      release(one);  // a parked one may not be touched
      throw;
    }
  }

  void credits() {
    check(kvq_credits_request(tiny_->get(), static_cast<std::uint32_t>(below(10)), 500));
    check(kvq_credits_return(tiny_->get(), static_cast<std::uint32_t>(below(10))));
  }

  const std::string socket_;
  std::mt19937_64 random_;
  std::optional<TinyModel> tiny_;
  std::vector<Request> open_;
  std::uint64_t acts_ = 0;
  Formats pages_;
  std::map<std::string, std::uint64_t> failures_;
};

bool told_to_end() {
  pollfd line{0, POLLIN, 0};
  return ::poll(&line, 1, 0) != 0;
}

}  // namespace

// Arguments: socket, seed, uid, point or "-", how many times it is passed.
KVQ_ROLE(chaos_worker) {
  const auto uid = static_cast<uid_t>(std::stoul(arguments[2]));
  if (uid != 0 && (::setgroups(0, nullptr) != 0 || ::setgid(uid) != 0 || ::setuid(uid) != 0)) return 2;
  wanted_point = arguments[3];
  times_left = std::stoull(arguments[4]);
#if defined(KVQ_KILL_POINTS)
  kill_point_hook = at_point;
#endif
  Server server(arguments[0], std::stoull(arguments[1]));
  say("started");
  while (!told_to_end()) server.act();
  times_left = 0;
  server.leave();
  say(server.report());
  return 0;
}

}  // namespace kvq::test
