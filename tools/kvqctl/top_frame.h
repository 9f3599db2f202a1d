// What the terminal is to show: lines of styled text.
//
// Invariant: ASCII, one character a column. Nothing is told by a style alone: without colours all is still there.
#pragma once

#include <string>
#include <vector>

namespace kvqctl {

enum class Style { plain, dim, bold, title, good, warn, alarm, dense, quantized, limbo, slack };

struct Span {
  std::string text;
  Style style = Style::plain;
};
using Line = std::vector<Span>;
using Frame = std::vector<Line>;

std::size_t width_of(const Line& line);
// Each line cut or filled to `width`, and `height` lines.
Frame fit(Frame frame, std::size_t width, std::size_t height);
std::string text_of(const Frame& frame);  // without styles and without spaces at ends

}  // namespace kvqctl
