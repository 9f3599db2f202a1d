// Invariant: the oracle's time is in no measurement.
#include "tests/multiprocess/decoder.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <sstream>
#include <thread>
#include <vector>

#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPrefix = 128, kLength = 320, kChunk = 16;
constexpr std::uint32_t kPatienceMs = 50'000;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double share_of(std::vector<double> sorted, double share) {
  if (sorted.empty()) return 0;
  return sorted[std::min(sorted.size() - 1, static_cast<std::size_t>(share * static_cast<double>(sorted.size())))];
}

class Decoder {
 public:
  Decoder(const std::string& socket, std::uint32_t stream)
      : tiny_(socket, {.credits = 8}),
        prefix_(token_stream(stream * 2 + 100, kPrefix)),
        tokens_(token_stream(stream * 2 + 101, kLength)) {
    Sequence first = tiny_.model().open({});
    tiny_.write(first, 0, prefix_, kPatienceMs);
    tiny_.await_cached(prefix_, kPrefix);
  }

  void turn() {
    if (at_ == 0) sequence_ = tiny_.model().open({});
    const std::vector<std::uint32_t> chunk(tokens_.begin() + static_cast<std::ptrdiff_t>(at_),
                                           tokens_.begin() + static_cast<std::ptrdiff_t>(at_ + kChunk));
    auto start = Clock::now();
    tiny_.write(sequence_, at_, chunk, kPatienceMs);
    turns_.push_back(ms_since(start));
    at_ += kChunk;
    note(tiny_.attend_and_check(sequence_.block_table(), static_cast<std::int32_t>(at_), at_ / kChunk % 2, ++seed_));
    start = Clock::now();
    std::uint64_t cached = 0;
    Sequence again = tiny_.model().open(prefix_, &cached);
    attaches_.push_back(ms_since(start));
    if (cached < kPrefix) {  // dropped for want of room: written anew
      tiny_.write(again, cached, {prefix_.begin() + static_cast<std::ptrdiff_t>(cached), prefix_.end()}, kPatienceMs);
    }
    note(tiny_.attend_and_check(again.block_table(), kPrefix, at_ / kChunk % 2, ++seed_));
    if (at_ < kLength) return;
    const auto table = sequence_.block_table();
    for (std::size_t i = 0; i < table.size(); ++i) {
      tiny_.check_dense_bytes(table[i], i * KVQ_PAGE_TOKENS, tokens_.data() + i * KVQ_PAGE_TOKENS);
    }
    at_ = 0;
  }

  std::string report() {
    std::sort(turns_.begin(), turns_.end());
    std::sort(attaches_.begin(), attaches_.end());
    std::ostringstream out;
    out << turns_.size();
    for (const auto* times : {&turns_, &attaches_})
      out << ' ' << share_of(*times, 0.5) << ' ' << share_of(*times, 0.99) << ' '
          << (times->empty() ? 0 : times->back());
    out << ' ' << quantized_ << ' ' << tiny_.model().pressure().reconnects << ' ' << tiny_.model().info().session;
    turns_.clear();
    attaches_.clear();
    quantized_ = 0;
    return out.str();
  }

 private:
  void note(const Seen& seen) { quantized_ += seen.mixed + seen.quantized; }

  TinyModel tiny_;
  const std::vector<std::uint32_t> prefix_, tokens_;
  Sequence sequence_;
  std::size_t at_ = 0;
  std::uint64_t seed_ = test_seed(), quantized_ = 0;
  std::vector<double> turns_, attaches_;
};

KVQ_ROLE(decoder) {
  Decoder decoder(arguments[0], static_cast<std::uint32_t>(std::stoul(arguments[1])));
  say("started");
  for (;;) {
    pollfd told{0, POLLIN, 0};
    if (::poll(&told, 1, 0) == 0) {
      decoder.turn();
      continue;
    }
    if (hear() != "report") return 0;
    say(decoder.report());
  }
}

}  // namespace

std::string DecoderReport::text() const {
  char out[256];
  std::snprintf(
      out, sizeof(out),
      "%llu turns: p50 %.2f ms, p99 %.2f ms, longest %.1f ms; attach: p50 %.2f ms, p99 %.2f ms, longest %.1f ms",
      static_cast<unsigned long long>(turns), turn_p50_ms, turn_p99_ms, turn_max_ms, attach_p50_ms, attach_p99_ms,
      attach_max_ms);
  return out;
}

DecoderProcess::DecoderProcess(const std::string& socket, std::uint32_t stream)
    : process_("decoder", {socket, std::to_string(stream)}) {
  if (const std::string line = process_.hear(); line != "started") throw std::runtime_error(line);
}

DecoderReport DecoderProcess::report() {
  process_.say("report");
  const std::string line = process_.hear();
  DecoderReport r;
  std::istringstream in(line);
  in >> r.turns >> r.turn_p50_ms >> r.turn_p99_ms >> r.turn_max_ms >> r.attach_p50_ms >> r.attach_p99_ms >>
      r.attach_max_ms >> r.quantized_calls >> r.reconnects >> r.session;
  if (!in) throw std::runtime_error("the decoder says: " + line);
  return r;
}

void DecoderProcess::decode_for(std::uint32_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

int DecoderProcess::end() {
  process_.say("end");
  return process_.wait();
}

}  // namespace kvq::test
