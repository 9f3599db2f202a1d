// A peer's socket that stops being read while too many replies wait to be fetched from the other end.
//
// Invariant: what a peer sends can queue at most `full`'s bound of replies (and the few of one read), so that neither
// memory nor the stack grows with a peer that asks and never listens: KJ takes a queue of unsent messages down by
// recursion, one level of calls for each. A failed write opens the gate for good, so that the end of the connection is
// seen.
#pragma once

#include <kj/async-io.h>

#include <functional>

namespace kvq {

class GatedStream final : public kj::AsyncCapabilityStream {
 public:
  explicit GatedStream(kj::Own<kj::AsyncCapabilityStream> socket) : socket_(kj::mv(socket)) {}

  // Says whether too many replies wait. Set once, before the first read; asked on the loop thread.
  void set_full(std::function<bool()> full) { full_ = std::move(full); }

  kj::Promise<size_t> tryRead(void* buffer, size_t min_bytes, size_t max_bytes) override {
    return gate().then([=, this] { return socket_->tryRead(buffer, min_bytes, max_bytes); });
  }
  kj::Promise<ReadResult> tryReadWithFds(void* buffer, size_t min_bytes, size_t max_bytes, kj::AutoCloseFd* fds,
                                         size_t max_fds) override {
    return gate().then([=, this] { return socket_->tryReadWithFds(buffer, min_bytes, max_bytes, fds, max_fds); });
  }
  kj::Promise<ReadResult> tryReadWithStreams(void* buffer, size_t min_bytes, size_t max_bytes,
                                             kj::Own<AsyncCapabilityStream>* streams, size_t max_streams) override {
    return gate().then(
        [=, this] { return socket_->tryReadWithStreams(buffer, min_bytes, max_bytes, streams, max_streams); });
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
  std::function<bool()> full_;
  kj::Own<kj::PromiseFulfiller<void>> opener_;
  bool failed_ = false;
};

}  // namespace kvq
