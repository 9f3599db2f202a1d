// Of kvqctl only this file knows ncurses.
#include "tools/kvqctl/screen.h"

#define NCURSES_NOMACROS  // functions: the macros have short names
#include <ncurses.h>
#include <term.h>
#undef lines
#include <unistd.h>

#include <cstdlib>

#include "tools/kvqctl/admin_client.h"
#include "tools/kvqctl/top_model.h"

namespace kvqctl {
namespace {

constexpr int kEscapeWaitMs = 50;  // for the rest of a key that begins with Esc

attr_t attributes(Style style) {
  switch (style) {
    case Style::dim:
      return A_DIM;
    case Style::bold:
      return A_BOLD;
    case Style::title:
      return A_REVERSE;
    case Style::alarm:
      return A_BOLD | A_REVERSE;
    default:
      return A_NORMAL;
  }
}

// 0: the terminal's own.
short colour(Style style) {
  switch (style) {
    case Style::good:
      return COLOR_GREEN;
    case Style::warn:
    case Style::limbo:
      return COLOR_YELLOW;
    case Style::alarm:
      return COLOR_RED;
    case Style::dense:
      return COLOR_BLUE;
    case Style::quantized:
      return COLOR_CYAN;
    default:
      return 0;
  }
}

}  // namespace

Screen::Screen(bool colours) : colours_(colours) {
  const char* kind = std::getenv("TERM");
  int known = 0;
  if (kind == nullptr || ::setupterm(kind, STDOUT_FILENO, &known) != OK) {
    throw Failure(kUsage, std::string("the terminal is of an unknown kind (TERM is ") +
                              (kind == nullptr ? "not set" : kind) + "); set TERM, or use kvqctl status --watch 1");
  }
  const bool has_places = ::tigetstr("cup") != nullptr;
  ::del_curterm(::set_curterm(nullptr));
  if (!has_places || ::newterm(kind, stdout, stdin) == nullptr) {
    throw Failure(kUsage,
                  std::string("a terminal of kind ") + kind + " cannot show a screen; use kvqctl status --watch 1");
  }
  ::cbreak();
  ::noecho();
  ::curs_set(0);
  ::keypad(stdscr, TRUE);
  ::set_escdelay(kEscapeWaitMs);
  colours_ = colours_ && ::has_colors();
  if (!colours_) return;
  ::start_color();
  ::use_default_colors();
  for (short c = COLOR_RED; c <= COLOR_CYAN; ++c) ::init_pair(c, c, -1);
}

Screen::~Screen() { ::endwin(); }

std::size_t Screen::width() const { return static_cast<std::size_t>(getmaxx(stdscr)); }
std::size_t Screen::height() const { return static_cast<std::size_t>(getmaxy(stdscr)); }

void Screen::draw(const Frame& frame) {
  ::erase();
  for (std::size_t y = 0; y < frame.size(); ++y) {
    ::move(static_cast<int>(y), 0);
    for (const Span& span : frame[y]) {
      const attr_t attribute = attributes(span.style) | (colours_ ? COLOR_PAIR(colour(span.style)) : 0);
      ::attrset(static_cast<int>(attribute));
      ::addnstr(span.text.c_str(), static_cast<int>(span.text.size()));
    }
  }
  ::refresh();
}

int Screen::key(int wait_ms) {
  ::timeout(wait_ms);
  switch (const int key = ::getch(); key) {
    case ERR:
    case KEY_RESIZE:
      return 0;
    case KEY_UP:
      return kUp;
    case KEY_DOWN:
      return kDown;
    case KEY_PPAGE:
      return kPageUp;
    case KEY_NPAGE:
      return kPageDown;
    case KEY_BACKSPACE:
    case '\b':
      return kBackspace;
    case KEY_ENTER:
    case '\r':
      return kEnter;
    default:
      return key;
  }
}

}  // namespace kvqctl
