// Invariant: no two of its texts are alike, so that each of its pages is new, is cached when its sequence ends, and is
// dropped for lack of room alone.
//
// Where the pages of a document lie among pages that come and go, each goes with its slab: the slab empties around
// them until it is the emptiest of its layout, and its last pages are moved. A slab that holds nothing but pages that
// stay is never emptied; so slabs must be much larger than the document, and the document must come anew for its pages
// to be quantized, too, while they are read.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <iostream>
#include <optional>

#include "tests/bench/gpu_node/llama.h"
#include "tests/bench/gpu_node/roles.h"

namespace kvq::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kPieceTokens = 512;  // of the document, between two sequences
constexpr auto kHandover = std::chrono::milliseconds(300);
volatile sig_atomic_t stopped = 0;

// Editions of the decoders' document, written piece by piece. One stays dense until the decoders have had time to go
// over to it; from then on it is theirs alone, and quantized under them.
class Press {
 public:
  Press(Llama& llama, std::uint64_t tokens, std::chrono::milliseconds pause)
      : llama_(llama), tokens_(tokens), pause_(pause), due_(Clock::now()) {}

  void turn() {
    if (pause_.count() == 0 || Clock::now() < due_) return;
    if (!sequence_) {
      sequence_.emplace(llama_.open_dense());
      written_ = 0;
    }
    if (written_ == tokens_) {
      sequence_.reset();
      ++editions_;
      due_ = Clock::now() + pause_;
      return;
    }
    const std::uint64_t piece = std::min(kPieceTokens, tokens_ - written_);
    llama_.grow(*sequence_, written_, piece, 0, 2000, editions_ + 1);
    written_ += piece;
    if (written_ == tokens_) due_ = Clock::now() + kHandover;
  }
  std::uint32_t editions() const { return editions_; }

 private:
  Llama& llama_;
  const std::uint64_t tokens_;
  const std::chrono::milliseconds pause_;
  Clock::time_point due_;
  std::optional<Sequence> sequence_;
  std::uint64_t written_ = 0;
  std::uint32_t editions_ = 0;  // given to the decoders
};

}  // namespace

int churner(const Arguments& arguments) {
  const std::uint64_t tokens = arguments.number("tokens", 4096), alive = arguments.number("sequences", 8);
  ::signal(SIGTERM, [](int) { stopped = 1; });
  // The document's seed: its K and V are a function of it. The texts of its own begin far behind.
  Llama llama(arguments.text("socket"), 1, static_cast<std::uint32_t>(arguments.number("credits", 256)));
  Press press(llama, arguments.number("document", 8192), std::chrono::milliseconds(arguments.number("edition-ms", 0)));
  std::deque<Sequence> sequences;
  std::uint64_t made = 0, refused = 0;
  std::cout << "ready" << std::endl;
  const auto end = Clock::now() + std::chrono::milliseconds(arguments.number("milliseconds", 10'000));
  while (stopped == 0 && Clock::now() < end) {
    try {
      sequences.push_back(llama.open(0));
      llama.grow(sequences.back(), 0, tokens, (made + 1) * 1'000'000, 2000);
      ++made;
      press.turn();
    } catch (const Failure& failure) {
      if (failure.status() != KVQ_ERR_NO_MEMORY) throw;
      ++refused;
    }
    while (sequences.size() > alive) sequences.pop_front();
  }
  std::cout << nlohmann::json{{"sequences", made},
                              {"refused", refused},
                              {"tokens", made * tokens},
                              {"editions", press.editions()}}
                   .dump()
            << std::endl;
  return 0;
}

}  // namespace kvq::bench
