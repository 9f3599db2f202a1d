// Figures as people read them, and columns.
//
// Invariant: pure text, ASCII only, so that a character is a column.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvqctl {

using Row = std::vector<std::string>;

std::string format_double(const char* format, double value);
std::string bytes_text(double bytes);                  // "0 B", "12.5 MiB", "1024 MiB" is "1.0 GiB"
std::string percent(double share);                     // "43 %"
std::string duration(std::uint64_t ms);                // "1.2 s", "3 min 4 s", "2 h 5 min", "3 d 4 h"
std::string rate_text(double per_second);              // "0", "0.4", "12", "3400"
std::string ascii(std::string_view text);              // what is no printable ASCII character becomes '?'
std::string fit(std::string text, std::size_t width);  // cut, or filled with spaces

// Columns as wide as their widest cell; those in `left` aligned left, all others right.
std::string table(const std::vector<Row>& rows, const std::vector<std::size_t>& left);

// "8GiB": bytes, or a number with B, KiB, MiB, GiB or TiB, as in kvqd's configuration. Nothing when it is none.
std::optional<std::uint64_t> size_of(const std::string& text);

}  // namespace kvqctl
