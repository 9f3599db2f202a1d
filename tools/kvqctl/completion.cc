// One line for each verb, in each shell's own words.
#include "tools/kvqctl/completion.h"

#include <CLI/CLI.hpp>

namespace kvqctl {
namespace {

struct Verb {
  std::string name, text;
  std::vector<std::pair<std::string, std::string>> options;  // "--json" and what it does
};

std::vector<std::pair<std::string, std::string>> options_of(const CLI::App& app) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) out.emplace_back("--" + name, option->get_description());
  }
  return out;
}

// Options of the program itself are taken behind each verb, too.
std::vector<Verb> verbs_of(const CLI::App& app) {
  std::vector<Verb> out;
  for (const CLI::App* verb : app.get_subcommands({})) {
    out.push_back({verb->get_name(), verb->get_description(), options_of(*verb)});
    for (const auto& [name, text] : options_of(app)) {
      if (name != "--help") out.back().options.emplace_back(name, text);
    }
  }
  return out;
}

std::string bash(const std::vector<Verb>& verbs, const std::string& whole) {
  std::string names, cases;
  for (const Verb& verb : verbs) {
    names += " " + verb.name;
    cases += "    " + verb.name + ") words=\"";
    for (const auto& [name, text] : verb.options) cases += name + " ";
    cases += "\" ;;\n";
  }
  return "# bash completion of kvqctl\n"
         "_kvqctl() {\n"
         "  local words=\"" +
         whole + names +
         "\" word\n"
         "  if [[ ${COMP_WORDS[COMP_CWORD-1]} == --socket ]]; then COMPREPLY=($(compgen -f -- "
         "\"${COMP_WORDS[COMP_CWORD]}\")); return; fi\n"
         "  for word in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
         "    case $word in\n" +
         cases +
         "    esac\n"
         "  done\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n"
         "}\n"
         "complete -F _kvqctl kvqctl\n";
}

// Text inside '...' of a shell; in zsh's lists a colon ends a name.
std::string quoted(const std::string& text, bool zsh) {
  std::string out;
  for (char c : text) {
    if (c == '\'') {
      out += "'\\''";
    } else if (zsh && c == ':') {
      out += std::string("\\") + c;
    } else {
      out += c;
    }
  }
  return out;
}

std::string zsh(const std::vector<Verb>& verbs) {
  std::string names, cases;
  for (const Verb& verb : verbs) {
    names += "    '" + verb.name + ":" + quoted(verb.text, true) + "'\n";
    cases += "      " + verb.name + ") words_of_verb=(\n";
    for (const auto& [name, text] : verb.options) cases += "        '" + name + ":" + quoted(text, true) + "'\n";
    cases += "      )\n      _describe -o option words_of_verb\n      return ;;\n";
  }
  return "#compdef kvqctl\n"
         "_kvqctl() {\n"
         "  local word\n"
         "  local -a words_of_verb verbs=(\n" +
         names +
         "  )\n"
         "  if [[ ${words[CURRENT-1]} == --socket ]]; then _files; return; fi\n"
         "  for word in ${words[2,CURRENT-1]}; do\n"
         "    case $word in\n" +
         cases +
         "    esac\n"
         "  done\n"
         "  _describe verb verbs\n"
         "}\n"
         "if [ \"$funcstack[1]\" = _kvqctl ]; then _kvqctl \"$@\"; else compdef _kvqctl kvqctl; fi\n";
}

std::string fish(const std::vector<Verb>& verbs) {
  std::string out = "# fish completion of kvqctl\ncomplete -c kvqctl -f\ncomplete -c kvqctl -l socket -r -F\n";
  for (const Verb& verb : verbs) {
    out += "complete -c kvqctl -n __fish_use_subcommand -a " + verb.name + " -d '" + quoted(verb.text, false) + "'\n";
    for (const auto& [name, text] : verb.options) {
      if (name == "--socket") continue;
      out += "complete -c kvqctl -n '__fish_seen_subcommand_from " + verb.name + "' -l " + name.substr(2) + " -d '" +
             quoted(text, false) + "'\n";
    }
  }
  return out;
}

}  // namespace

std::string completion_for(const std::string& shell, const CLI::App& app) {
  const std::vector<Verb> verbs = verbs_of(app);
  std::string whole;
  for (const auto& [name, text] : options_of(app)) whole += (whole.empty() ? "" : " ") + name;
  return shell == "bash" ? bash(verbs, whole) : shell == "zsh" ? zsh(verbs) : fish(verbs);
}

}  // namespace kvqctl
