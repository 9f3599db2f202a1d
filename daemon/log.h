// The daemon's log: one line an event, key=value pairs, on stderr.
//
// Invariant: nobody can flood it: each kind of event (its first word) gets at most a fixed number of lines a second,
// and what was left out is counted in the next line that gets through.
#pragma once

#include <cstdint>
#include <string>

namespace kvq {

// `level`: trace, debug, info, warn, error or off. Lines get a time unless stderr is the journal, which has its own.
void start_log(const std::string& level);

// Loop thread only. Returns the line as it got through; empty: it was left out.
std::string log_event(const std::string& line, std::uint64_t now_ms);
void log_warning(const std::string& line);
void log_error(const std::string& line);

}  // namespace kvq
