// toml++ tells where in the text each key and value lies; what lies there is replaced, all else is copied.
#include "daemon/config_edit.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "daemon/config_setting.h"

namespace kvq {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& problem) {
  throw StartupError(ExitCode::usage, path + ": " + problem);
}

toml::table parse(const std::string& text, const std::string& path) {
  try {
    return toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    const std::string problem(error.description());
    fail(path, "line " + std::to_string(error.source().begin.line) +
                   " is not valid TOML: " + problem.substr(0, problem.find('\n')));
  }
}

// Byte of a place; columns are counted in characters of UTF-8.
std::size_t offset_of(const std::string& text, const toml::source_position& place) {
  std::size_t at = 0;
  for (toml::source_index line = 1; line < place.line; ++line) at = std::min(text.find('\n', at), text.size() - 1) + 1;
  const auto is_inside = [&](std::size_t i) { return i < text.size() && (text[i] & 0xc0) == 0x80; };
  for (toml::source_index column = 1; column < place.column && at < text.size(); ++column) {
    do ++at;
    while (is_inside(at));
  }
  return at;
}

std::size_t line_begin(const std::string& text, std::size_t at) {
  const std::size_t found = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
  return found == std::string::npos ? 0 : found + 1;
}

std::size_t line_end(const std::string& text, std::size_t at) {  // behind its line feed
  const std::size_t found = text.find('\n', at);
  return found == std::string::npos ? text.size() : found + 1;
}

std::string line_at(const std::string& text, std::size_t at) {
  std::string line = text.substr(line_begin(text, at), line_end(text, at) - line_begin(text, at));
  line.erase(line.find_last_not_of(" \t\r\n") + 1);
  return line.substr(std::min(line.find_first_not_of(" \t"), line.size()));
}

// Where a setting is to stand, under which name.
struct Target {
  toml::table* table;
  std::string name;
  bool is_root;
};

Target target_of(toml::table& root, const std::string& path, std::string_view key) {
  const std::size_t dot = key.find('.');
  if (dot == std::string_view::npos) return {&root, std::string(key), true};
  const std::string name(key.substr(dot + 1));
  if (auto* tenants = root["tenants"].as_array(); tenants != nullptr) {
    for (auto& entry : *tenants) {
      auto* table = entry.as_table();
      if (table == nullptr || (*table)["name"].value_or(std::string()) != name) continue;
      return {table, key.substr(0, dot) == "quota" ? "quota_bytes" : "share", false};
    }
  }
  fail(path, "has no [[tenants]] table named " + name + "; add one with its uids, and " +
                 (key.substr(0, dot) == "quota" ? "quota_bytes" : "share") + " in it");
}

// Empty: the setting is to be left out.
std::optional<std::string> toml_value(const std::string& path, std::string_view key, std::string_view value) {
  if (key.starts_with("quota.")) {
    const auto bytes = parse_size(value);
    if (!bytes || value.find_first_of("\"\\\n") != value.npos) fail(path, std::string(value) + " is not a size");
    if (*bytes == 0) return std::nullopt;
    const bool digits = value.find_first_not_of("0123456789") == value.npos;
    return digits ? std::to_string(*bytes) : '"' + std::string(value) + '"';
  }
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size()) fail(path, std::string(value) + " is not a number");
  return decimal(number);
}

struct Place {
  std::size_t key, value, end;  // bytes
};

std::optional<Place> place_of(const std::string& text, const toml::table& table, const std::string& name) {
  for (const auto& [key, node] : table) {
    if (key.str() != name) continue;
    return Place{offset_of(text, key.source().begin), offset_of(text, node.source().begin),
                 offset_of(text, node.source().end)};
  }
  return std::nullopt;
}

// The last value that belongs to a table itself. What a header ([...]) makes begins before its key.
std::optional<Place> last_of(const std::string& text, const toml::table& table) {
  std::optional<Place> last;
  for (const auto& [key, node] : table) {
    const auto place = place_of(text, table, std::string(key.str()));
    if (place->value > place->key && (!last || place->end > last->end)) last = place;
  }
  return last;
}

// In a file without any setting of the daemon: behind the comments that it begins with.
std::size_t behind_first_comments(const std::string& text) {
  std::size_t at = 0;
  while (at < text.size() && text[at] == '#') at = line_end(text, at);
  return at;
}

ConfigEdit with_new_line(const std::string& text, const Target& target, const std::string& setting) {
  const auto last = last_of(text, *target.table);
  if (last && target.table->is_inline() && !target.is_root) {
    std::string out = text;
    out.insert(last->end, ", " + setting);
    return {out, line_at(out, last->end)};
  }
  const std::size_t at = last ? line_end(text, last->end) : behind_first_comments(text);
  std::string indent;
  if (last) {
    const std::size_t begin = line_begin(text, last->key);
    indent = text.substr(begin, text.find_first_not_of(" \t", begin) - begin);
  }
  const std::string feed = text.find("\r\n") != std::string::npos ? "\r\n" : "\n";
  const bool cut = at > 0 && text[at - 1] != '\n';  // the file's last line has no end
  std::string out = text;
  out.insert(at, (cut ? feed : "") + indent + setting + feed);
  return {out, setting};
}

ConfigEdit as_comment(const std::string& text, const std::string& path, const Target& target, const Place& place) {
  const std::size_t begin = line_begin(text, place.key);
  const std::string before = text.substr(begin, place.key - begin);
  const std::string after = text.substr(place.end, line_end(text, place.end) - place.end);
  const std::size_t next = after.find_first_not_of(" \t\r\n");
  const bool alone = before.find_first_not_of(" \t") == before.npos && line_begin(text, place.end) == begin &&
                     (next == after.npos || after[next] == '#');
  if (!alone) fail(path, "the line of " + target.name + " has more in it: take that setting out by hand");
  std::string out = text;
  out.insert(place.key, "# ");
  return {out, line_at(out, place.key)};
}

}  // namespace

ConfigEdit edit_config(const std::string& text, const std::string& path, std::string_view key, std::string_view value) {
  toml::table meant = parse(text, path);
  const Target target = target_of(meant, path, key);
  const std::optional<std::string> wanted = toml_value(path, key, value);
  const auto place = place_of(text, *target.table, target.name);
  ConfigEdit edit{text, {}};
  if (!wanted && !place) return edit;
  if (!wanted) {
    edit = as_comment(text, path, target, *place);
    target.table->erase(target.name);
  } else {
    if (place) {
      edit.text.replace(place->value, place->end - place->value, *wanted);
      edit.line = line_at(edit.text, place->key);
    } else {
      edit = with_new_line(text, target, target.name + " = " + *wanted);
    }
    const toml::table one = toml::parse("value = " + *wanted);
    target.table->insert_or_assign(target.name, one.at("value"));
  }
  if (parse(edit.text, path) != meant) fail(path, "cannot be changed safely here; set " + target.name + " by hand");
  if (edit.text == text) edit.line.clear();
  return edit;
}

}  // namespace kvq
