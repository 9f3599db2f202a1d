// One setting changed in the text of a configuration file.
//
// Invariant: the text that is returned means what the old one meant but for that one value: both are parsed and
// compared. Comments, order, spaces and line ends stay as they are. What cannot be changed that way throws
// StartupError.
#pragma once

#include <string>
#include <string_view>

#include "daemon/exit_code.h"

namespace kvq {

struct ConfigEdit {
  std::string text;
  std::string line;  // the changed one, as it is now; empty: the file says that already
};

// `key` and `value` as `kvqctl set` takes them: a setting of the daemon, or quota.TENANT or share.TENANT. A quota of 0
// (the whole arena) is what holds without the setting, so that one becomes a comment. `path` is for messages.
ConfigEdit edit_config(const std::string& text, const std::string& path, std::string_view key, std::string_view value);

}  // namespace kvq
