// The daemon's log: one line an event, key=value pairs, on stderr or in the journal.
//
// Invariant: nobody can flood it: each kind of event (its first word) gets at most a fixed number of lines a second,
// and what was left out is counted in the next line that gets through.
#pragma once

#include <cstdint>
#include <string>

namespace kvq {

// `level`: trace, debug, info, warn, error or off. Where stderr is the journal, each line goes there as an entry of its
// own: the line is its message, each word a field (KVQ_EVENT, KVQ_TENANT, ...). Else lines go to stderr, with their
// time.
void start_log(const std::string& level);

// Whether it is another level than before. Errors are the configuration's: `level` is one of those above.
bool set_log_level(const std::string& level);

// Loop thread only. Returns the line as it got through; empty: it was left out.
std::string log_event(const std::string& line, std::uint64_t now_ms);
void log_warning(const std::string& line);
void log_error(const std::string& line);

}  // namespace kvq
