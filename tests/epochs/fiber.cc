// makecontext passes ints, so the fiber's address travels in two halves.
#include "tests/epochs/fiber.h"

#include <cstdint>

namespace kvq::model {

void Fiber::enter(unsigned low, unsigned high) {
  reinterpret_cast<Fiber*>(std::uintptr_t{low} | (std::uintptr_t{high} << 32))->body_();
}

void Fiber::start(std::function<void()> body) {
  body_ = std::move(body);
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self),
              static_cast<unsigned>(self >> 32));
}

}  // namespace kvq::model
