// A peer's socket that stops being read while too many replies wait to be fetched from the other end.
//
// Invariant: what a peer sends can queue at most `full`'s bound of replies (and the few of one read), so that neither
// memory nor the stack grows with a peer that asks and never listens: KJ takes a queue of unsent messages down by
// recursion, one level of calls for each. A failed write opens the gate for good, so that the end of the connection is
// seen. Descriptors that a peer sends never enter the daemon's table: they are read past, and the kernel closes them.
#pragma once

#include <kj/async-io.h>

#include <cstdint>
#include <functional>

namespace kvq {

class GatedStream final : public kj::AsyncCapabilityStream {
 public:
  GatedStream(kj::Own<kj::AsyncCapabilityStream> socket, std::function<std::uint64_t()> now_ms)
      : socket_(kj::mv(socket)), now_ms_(std::move(now_ms)) {}

  // Says whether too many replies wait. Set once, before the first read; asked on the loop thread.
  void set_full(std::function<bool()> full) { full_ = std::move(full); }

  // Called when the peer has gone, before anybody who reads is told. Set once, likewise.
  void set_ended(std::function<void()> ended) { ended_ = std::move(ended); }

  // When the first byte of the message came that is on its way; 0: none is.
  std::uint64_t since_ms() const { return since_ms_; }
  void message_over() { since_ms_ = 0; }

  kj::Promise<size_t> tryRead(void* buffer, size_t min_bytes, size_t max_bytes) override {
    return gate().then(
        [=, this] { return read_more(static_cast<kj::byte*>(buffer), min_bytes, max_bytes, /*got_bytes=*/0); });
  }
  kj::Promise<ReadResult> tryReadWithFds(void* buffer, size_t min_bytes, size_t max_bytes, kj::AutoCloseFd*,
                                         size_t) override {
    return tryRead(buffer, min_bytes, max_bytes).then([](size_t got_bytes) { return ReadResult{got_bytes, 0}; });
  }
  kj::Promise<ReadResult> tryReadWithStreams(void* buffer, size_t min_bytes, size_t max_bytes,
                                             kj::Own<AsyncCapabilityStream>*, size_t) override {
    return tryRead(buffer, min_bytes, max_bytes).then([](size_t got_bytes) { return ReadResult{got_bytes, 0}; });
  }

  kj::Promise<void> write(const void* buffer, size_t size) override { return watch(socket_->write(buffer, size)); }
  kj::Promise<void> write(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) override {
    return watch(socket_->write(pieces));
  }
  kj::Promise<void> writeWithFds(kj::ArrayPtr<const kj::byte> data,
                                 kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> more,
                                 kj::ArrayPtr<const int> fds) override {
    return watch(socket_->writeWithFds(data, more, fds));
  }
  kj::Promise<void> writeWithStreams(kj::ArrayPtr<const kj::byte> data,
                                     kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> more,
                                     kj::Array<kj::Own<AsyncCapabilityStream>> streams) override {
    return watch(socket_->writeWithStreams(data, more, kj::mv(streams)));
  }

  kj::Promise<void> whenWriteDisconnected() override { return socket_->whenWriteDisconnected(); }
  void shutdownWrite() override { socket_->shutdownWrite(); }
  void abortRead() override { socket_->abortRead(); }
  kj::Maybe<int> getFd() const override { return socket_->getFd(); }

 private:
  bool shut() const { return !failed_ && full_ && full_(); }

  kj::Promise<void> gate() {
    if (!shut()) return kj::READY_NOW;
    auto waiting = kj::newPromiseAndFulfiller<void>();
    opener_ = kj::mv(waiting.fulfiller);
    return kj::mv(waiting.promise);
  }

  // Piece by piece, so that the first byte of a message is seen when it comes.
  kj::Promise<size_t> read_more(kj::byte* buffer, size_t min_bytes, size_t max_bytes, size_t got_bytes) {
    if (got_bytes == max_bytes) return got_bytes;
    return socket_->tryRead(buffer + got_bytes, 1, max_bytes - got_bytes)
        .then([=, this](size_t more_bytes) -> kj::Promise<size_t> {
          if (more_bytes > 0 && since_ms_ == 0) since_ms_ = now_ms_();
          const size_t all_bytes = got_bytes + more_bytes;
          if (more_bytes == 0 && ended_) ended_();
          if (more_bytes == 0 || all_bytes >= min_bytes) return all_bytes;
          return read_more(buffer, min_bytes, max_bytes, all_bytes);
        });
  }

  kj::Promise<void> watch(kj::Promise<void> written) {
    return written.then(
        [this]() -> kj::Promise<void> {
          open_if_free();
          return kj::READY_NOW;
        },
        [this](kj::Exception&& exception) -> kj::Promise<void> {
          failed_ = true;
          open_if_free();
          return kj::mv(exception);
        });
  }

  void open_if_free() {
    if (opener_.get() == nullptr || shut()) return;
    opener_->fulfill();
    opener_ = nullptr;
  }

  kj::Own<kj::AsyncCapabilityStream> socket_;
  std::function<std::uint64_t()> now_ms_;
  std::function<bool()> full_;
  std::function<void()> ended_;
  kj::Own<kj::PromiseFulfiller<void>> opener_;
  bool failed_ = false;
  std::uint64_t since_ms_ = 0;
};

}  // namespace kvq
