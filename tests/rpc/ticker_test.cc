// The ticker runs when something has changed, whenever that was, and sleeps when nothing does.
#include "daemon/rpc/ticker.h"

#include <gtest/gtest.h>

#include "tests/rpc/fake_store.h"

namespace kvq {
namespace {

struct Ticking {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  EventLoop loop{io};
  testing::FakeStore store;
  std::function<void()> after = [] {};
  Ticker ticker{loop, store, 10, [this](std::uint64_t, const TickReport&) { after(); }};

  void run_ms(std::uint64_t ms) {
    auto end = kj::newPromiseAndFulfiller<void>();
    const EventLoop::Watch timer = loop.every(ms, [&] { end.fulfiller->fulfill(); });
    loop.run(kj::mv(end.promise));
  }
};

TEST(Ticker, SleepsWhenNothingIsThere) {
  Ticking t;
  t.run_ms(50);
  EXPECT_EQ(t.ticker.ticks(), 0u);
  t.ticker.soon();
  t.run_ms(50);
  EXPECT_EQ(t.ticker.ticks(), 1u);
}

// A session that is released behind a tick leaves pages in limbo, and nobody else may ever come.
TEST(Ticker, WhatIsAskedForBehindATickIsNotForgotten) {
  Ticking t;
  bool released = false;
  t.after = [&] {
    if (!std::exchange(released, true)) t.ticker.soon();
  };
  t.ticker.soon();
  t.run_ms(50);
  EXPECT_EQ(t.ticker.ticks(), 2u);
}

}  // namespace
}  // namespace kvq
