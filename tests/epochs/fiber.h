// Fibers: a thread of the model is one, so that a schedule is a choice and not an accident.
//
// Invariant: one runs at a time, on the caller's system thread; it goes on only where it was left. Nothing here is
// built with sanitizers (CMakeLists.txt says why).
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace kvq::model {

class Fiber {
 public:
  Fiber() : stack_(new std::byte[kStackBytes]) {}
  // `body` must end by switching away for good.
  void start(std::function<void()> body);
  static void switch_to(ucontext_t& from, ucontext_t& to) { swapcontext(&from, &to); }
  ucontext_t& context() { return context_; }

 private:
  static constexpr std::size_t kStackBytes = 256 << 10;
  static void enter(unsigned low, unsigned high);
  std::unique_ptr<std::byte[]> stack_;
  std::function<void()> body_;
  ucontext_t context_{};
};

}  // namespace kvq::model
