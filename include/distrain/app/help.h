#pragma once

#include <string>

#include "distrain/app/options.h"

namespace distrain::app {

/// The name of a subcommand and what it does in a line.
struct CommandLine {
  std::string name;
  std::string summary;
};

std::string version_text();
std::string main_help(const std::vector<CommandLine>& commands);

/// Usage, description, options by group with their defaults, and examples.
std::string command_help(const CommandLine& command, const std::string& description,
                         const OptionTable& table, const std::vector<std::string>& examples);

/// The table as JSON, for the checks of man pages and completions.
std::string dump_options(const CommandLine& command, const OptionTable& table);

}  // namespace distrain::app
