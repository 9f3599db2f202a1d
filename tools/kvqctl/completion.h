// Shell completion, made of the command line itself.
//
// Invariant: it names every verb and every option that the program has, and nothing else.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace kvqctl {

// A script for `shell`: bash, zsh or fish.
std::string completion_for(const std::string& shell, const CLI::App& app);

}  // namespace kvqctl
