// The terminal, by ncurses: frames out, keys in.
//
// Invariant: while a Screen lives the terminal is its; its destructor gives it back as it was.
#pragma once

#include "tools/kvqctl/top_frame.h"

namespace kvqctl {

class Screen {
 public:
  // Throws Failure where the terminal can show no screen.
  explicit Screen(bool colours);
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  std::size_t width() const, height() const;
  void draw(const Frame& frame);
  int key(int wait_ms);  // of top_model.h's Key or a character; 0: none came

 private:
  bool colours_;
};

}  // namespace kvqctl
