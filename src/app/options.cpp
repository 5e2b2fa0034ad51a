#include "options.h"

#include <algorithm>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/base/text.h"

namespace distrain::app {
namespace {

using base::invalid;

std::string spellings(const Option& option) {
  std::string names = "--" + option.name;
  for (std::string name : {option.name, option.old_name}) {
    if (name == option.old_name && !name.empty()) names += ",--" + name;
    if (name.find('-') == std::string::npos) continue;
    std::replace(name.begin(), name.end(), '-', '_');  // as the tutorials have it
    names += ",--" + name;
  }
  if (option.short_name) names += std::string(",-") + option.short_name;
  return names;
}

/// The option that an argument names, without dashes and value: "--batch_size=3" → "batch-size".
std::string named_in(const std::string& arg) {
  std::string name = arg.substr(arg.find_first_not_of('-'), std::string::npos);
  name = name.substr(0, name.find('='));
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

[[noreturn]] void refuse(const OptionTable& table, const std::vector<std::string>& extras) {
  const auto unknown = std::find_if(extras.begin(), extras.end(), [](const std::string& arg) {
    return arg.size() > 1 && arg[0] == '-';
  });
  if (unknown == extras.end()) invalid(fmt::format("unexpected argument '{}'", extras.front()));
  std::vector<std::string> names;
  for (const Option& option : table) {
    if (!option.hidden) names.push_back(option.name);
  }
  std::string message = fmt::format("unknown option {}", unknown->substr(0, unknown->find('=')));
  if (unknown->find_first_not_of('-') != std::string::npos) {
    if (const auto meant = base::did_you_mean(named_in(*unknown), names)) {
      message += fmt::format("; did you mean --{}?", *meant);
    }
  }
  invalid(std::move(message));
}

}  // namespace

ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args) {
  ParsedOptions parsed(table);
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  for (const Option& option : table) {
    if (option.kind == ValueKind::kFlag) {
      app.add_flag_function(spellings(option), [&parsed, &option](int64_t count) {
        if (count > 0) parsed.set(option.name, "true");
      });
      continue;
    }
    // The last one holds, so that a sweep can append to a command line.
    app.add_option_function<std::string>(
           spellings(option),
           [&parsed, &option](const std::string& value) {
             parsed.set(option.name, canonical_value(option, value, "--" + option.name));
           })
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  for (size_t i = 0; i < args.size(); ++i) {
    const size_t equals = args[i].find('=');
    if (equals == 2 && args[i][0] == '-') {
      invalid(fmt::format("write {} without '='", args[i].substr(0, equals)));
    }
    if (!args[i].starts_with("--") || args[i].size() == 2) continue;
    const Option* option = find_option(table, named_in(args[i]));
    if (!option) continue;
    if (option->kind == ValueKind::kFlag) {
      if (equals != std::string::npos) invalid(fmt::format("--{} takes no value", option->name));
      continue;
    }
    // CLI11 would take the argument that follows `--opt=`, or another option, as the value.
    const bool missing = equals == std::string::npos
                             ? i + 1 == args.size() || args[i + 1].starts_with("--")
                             : equals + 1 == args[i].size();
    if (missing) invalid(fmt::format("--{} needs a value", option->name));
    if (equals == std::string::npos) ++i;
  }
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 takes them reversed
  } catch (const CLI::ParseError& e) {
    invalid(e.what());
  }
  const std::vector<std::string> extras = app.remaining();
  if (!extras.empty()) refuse(table, extras);
  return parsed;
}

}  // namespace distrain::app
