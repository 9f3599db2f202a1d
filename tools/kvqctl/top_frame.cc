// Cutting and joining of lines.
#include "tools/kvqctl/top_frame.h"

namespace kvqctl {

std::size_t width_of(const Line& line) {
  std::size_t width = 0;
  for (const Span& span : line) width += span.text.size();
  return width;
}

Frame fit(Frame frame, std::size_t width, std::size_t height) {
  frame.resize(height);
  for (Line& line : frame) {
    std::size_t left = width;
    for (Span& span : line) {
      if (span.text.size() > left) span.text.resize(left);
      left -= span.text.size();
    }
    line.push_back({std::string(left, ' ')});
  }
  return frame;
}

std::string text_of(const Frame& frame) {
  std::string out;
  for (const Line& line : frame) {
    for (const Span& span : line) out += span.text;
    out.erase(out.find_last_not_of(' ') + 1);
    out += "\n";
  }
  return out;
}

}  // namespace kvqctl
