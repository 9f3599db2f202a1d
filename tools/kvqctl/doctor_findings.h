// What is wrong with a machine, from facts about it.
//
// Invariant: pure. Each finding that is not `ok` has a fix; a check whose facts are not to be had says so.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/kvqctl/tables.h"

namespace kvqctl {

enum class Verdict { ok, warn, bad };

struct Finding {
  std::string check;
  Verdict verdict = Verdict::ok;
  std::string text, fix;
};

struct Node {  // of /dev
  std::string path;
  bool readable_and_writable = false;
};

struct Facts {
  std::string socket, user;
  bool root = false;
  bool socket_folder = false, socket_exists = false, socket_is_one = false, socket_writable = false;
  std::string socket_group;             // of the file
  bool in_socket_group = false;         // this process is
  bool listed_in_socket_group = false;  // the user database says so, the login may be older
  std::string no_daemon;                // why it does not answer; empty: it does
  std::optional<Json> status;
  // Limits of the kvqd that answers, where they may be read; none: no daemon or not allowed.
  std::optional<std::uint64_t> open_files, locked_bytes;
  std::uint64_t memory_bytes = 0, available_bytes = 0, swap_used_bytes = 0;
  std::string driver;  // version; empty: none
  std::vector<Node> nodes;
  bool uvm_node = false, control_node = false;
  bool persistence = false;            // nvidia-persistenced runs
  bool mps = false;                    // its control daemon runs
  std::string clock_source, governor;  // empty: not to be had
};

std::vector<Finding> findings_of(const Facts& facts);
std::string show_findings(const std::vector<Finding>& findings);
Json document_of(const std::vector<Finding>& findings);  // {"ok", "findings": [{"check", "verdict", "text", "fix"}]}
bool any_bad(const std::vector<Finding>& findings);

}  // namespace kvqctl
