#include "options.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "distrain/base/error.h"

namespace distrain::app {
namespace {

using base::invalid;

/// The option that an argument names, without dashes and value: "--batch_size=3" → "batch-size".
/// With `_` it is as the tutorials have it.
std::string named_in(const std::string& arg) {
  std::string name = arg.substr(std::min(arg.find_first_not_of('-'), arg.size()));
  name = name.substr(0, name.find('='));
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

/// Null if it names none.
const Option* option_of(const OptionTable& table, const std::string& arg) {
  if (arg.starts_with("--")) return arg[2] == '-' ? nullptr : find_option(table, named_in(arg));
  const auto it = std::ranges::find_if(table, [&](const Option& option) {
    return option.short_name && arg == std::string{'-', option.short_name};
  });
  return it == table.end() ? nullptr : &*it;
}

[[noreturn]] void refuse(const OptionTable& table, const std::vector<std::string>& strangers) {
  const auto unknown = std::ranges::find_if(
      strangers, [](const std::string& arg) { return arg.size() > 1 && arg[0] == '-'; });
  if (unknown == strangers.end()) {
    invalid(fmt::format("unexpected argument '{}'", strangers.front()));
  }
  std::vector<std::string> names;
  for (const Option& option : table) {
    if (!option.hidden) names.push_back(option.name);
  }
  const auto meant = job::did_you_mean(named_in(*unknown), names);
  invalid(fmt::format("unknown option {}{}", unknown->substr(0, unknown->find('=')),
                      meant ? fmt::format("; did you mean --{}?", *meant) : ""));
}

}  // namespace

ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args) {
  // The last one holds, so that a sweep can append to a command line.
  std::map<const Option*, std::string> values;
  std::vector<std::string> strangers;
  for (size_t i = 0; i < args.size(); ++i) {
    const size_t equals = args[i].find('=');
    const bool has_value = equals != std::string::npos;
    if (equals == 2 && args[i][0] == '-') {
      invalid(fmt::format("write {} without '='", args[i].substr(0, equals)));
    }
    const Option* option = option_of(table, args[i]);
    if (!option) {
      strangers.push_back(args[i]);
    } else if (option->kind == ValueKind::kFlag) {
      if (has_value) invalid(fmt::format("--{} takes no value", option->name));
      values[option] = "true";
    } else {
      const bool missing = has_value ? equals + 1 == args[i].size()
                                     : i + 1 == args.size() || args[i + 1].starts_with("--");
      if (missing) invalid(fmt::format("--{} needs a value", option->name));
      values[option] = has_value ? args[i].substr(equals + 1) : args[++i];
    }
  }
  ParsedOptions parsed(table);
  for (const auto& [option, value] : values) {
    parsed.set(option->name, canonical_value(*option, value, "--" + option->name));
  }
  if (!strangers.empty()) refuse(table, strangers);
  return parsed;
}

}  // namespace distrain::app
