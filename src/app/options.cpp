#include "options.h"

#include <algorithm>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/base/text.h"

namespace distrain::app {
namespace {

using base::invalid;

/// The option that an argument names, without dashes and value: "--batch_size=3" → "batch-size".
std::string named_in(const std::string& arg) {
  std::string name = arg.substr(std::min(arg.find_first_not_of('-'), arg.size()));
  name = name.substr(0, name.find('='));
  std::replace(name.begin(), name.end(), '_', '-');  // as the tutorials have it
  return name;
}

/// Returns null if `arg` names no option.
const Option* option_of(const OptionTable& table, const std::string& arg) {
  if (arg.starts_with("--")) return find_option(table, named_in(arg));
  const bool is_short = arg.size() > 1 && arg[0] == '-' && arg.substr(0, arg.find('=')).size() == 2;
  const auto it = std::ranges::find(table, is_short ? arg[1] : '-', &Option::short_name);
  return it == table.end() ? nullptr : &*it;
}

[[noreturn]] void refuse(const OptionTable& table, const std::string& arg) {
  if (arg.size() < 2 || arg[0] != '-') {
    invalid(fmt::format("unexpected argument '{}': every option begins with --", arg));
  }
  std::vector<std::string> names;
  for (const Option& option : table) {
    if (!option.hidden) names.push_back(option.name);
  }
  const auto meant = base::did_you_mean(named_in(arg), names);
  invalid(fmt::format("unknown option {}{}", arg.substr(0, arg.find('=')),
                      meant ? fmt::format("; did you mean --{}?", *meant) : ""));
}

}  // namespace

ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args) {
  ParsedOptions parsed(table);
  for (size_t i = 0; i < args.size(); ++i) {
    const Option* option = option_of(table, args[i]);
    if (!option) refuse(table, args[i]);
    const size_t equals = args[i].find('=');
    const bool has_next = i + 1 < args.size();
    if (option->kind == ValueKind::kFlag) {
      if (equals != std::string::npos) invalid(fmt::format("--{} takes no value", option->name));
      if (has_next && !args[i + 1].starts_with('-')) {
        invalid(fmt::format("unexpected argument '{}': --{} takes no value", args[i + 1],
                            option->name));
      }
      parsed.set(option->name, "true");
      continue;
    }
    const bool missing = equals == std::string::npos ? !has_next || args[i + 1].starts_with("--")
                                                     : equals + 1 == args[i].size();
    if (missing) {
      invalid(fmt::format("--{} needs a value: {}", option->name, job::allowed_values(*option)));
    }
    const std::string value = equals == std::string::npos ? args[++i] : args[i].substr(equals + 1);
    // The last one holds, so that a sweep can append to a command line.
    parsed.set(option->name, canonical_value(*option, value, "--" + option->name));
  }
  return parsed;
}

}  // namespace distrain::app
