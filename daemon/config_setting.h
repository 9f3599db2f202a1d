// One setting with the place it came from, and the table of all scalar settings: the command line, the file and --help
// are three readings of that table.
//
// Invariant: whoever reads a value here either returns it in range or throws StartupError with one line
// "PLACE: KEY = VALUE: what is wrong; what to do".
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "daemon/config.h"

namespace kvq {

struct Setting {
  std::string place;  // "kvqd.toml:12" or "command line"
  std::string key;    // as written there: "arena_bytes" or "--arena-bytes"
  std::string shown;  // the value as written; empty if there is none to show
  std::variant<std::monostate, bool, std::int64_t, double, std::string> value;  // monostate: a type no setting has

  [[noreturn]] void fail(const std::string& problem) const;

  std::string text() const;
  bool boolean() const;
  std::uint64_t integer(std::uint64_t least, std::uint64_t most) const;
  double fraction() const;                                            // above 0, at most 1
  std::uint64_t size(std::uint64_t least, std::uint64_t most) const;  // bytes, or text such as "64MiB"
  std::size_t choice(std::span<const std::string_view> names) const;
};

// Where each key of the Config was set, by its name in the file, for checks across settings.
using Origins = std::map<std::string, Setting, std::less<>>;

enum class ValueKind { text, boolean, integer, fraction, size };

struct SettingRule {
  std::string_view key;
  ValueKind kind;
  std::string_view help;
  void (*apply)(Config&, const Setting&);
};

std::span<const SettingRule> setting_rules();  // of the file and of the command line
std::span<const SettingRule> test_rules();     // of the command line alone: what only tests and measurements change

void apply_setting(const SettingRule& rule, Setting setting, Config& config, Origins& origins);

// Names of the formats that quantizing may produce or a tenant may ask for.
Format format_choice(const Setting& setting, std::initializer_list<Format> formats);

// "256MiB" -> bytes; empty when it is no size or does not fit 64 bits.
std::optional<std::uint64_t> parse_size(std::string_view text);

// Shortest text that reads back as `value`.
std::string decimal(double value);

// "did you mean X?" for the candidate nearest to `word`, or `otherwise` when none is near.
std::string suggestion(std::string_view word, std::span<const std::string> candidates, std::string_view otherwise);

}  // namespace kvq
