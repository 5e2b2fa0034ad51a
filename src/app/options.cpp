#include "options.h"

#include <algorithm>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/base/text.h"

namespace distrain::app {
namespace {

std::string spellings(const Option& option) {
  std::string names = "--" + option.name;
  for (std::string name : {option.name, option.old_name}) {
    if (name == option.old_name && !name.empty()) names += ",--" + name;
    if (name.find('-') == std::string::npos) continue;
    std::replace(name.begin(), name.end(), '-', '_');  // as in PyTorch's tutorials
    names += ",--" + name;
  }
  if (option.short_name) names += std::string(",-") + option.short_name;
  return names;
}

/// Returns the name of the option in `arg`: "--batch_size=3" → "batch-size".
std::string named_in(const std::string& arg) {
  std::string name = arg.substr(std::min(arg.find_first_not_of('-'), arg.size()));
  name = name.substr(0, name.find('='));
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

/// Returns the end of the error message for the unknown option `name`: other jobs that have the
/// option, and the help to read, as in ": it is an option of ps; see distrain rnn --help".
std::string hint_of(const Program& program, const OptionTable& table, const std::string& name,
                    bool is_predict) {
  std::string owners, call = program.name + " predict";
  for (const JobCommand& job : program.commands) {
    if (&job.table == &table && !is_predict) call = program.call_of(job);
    if (!find_option(job.table, name) || find_option(table, name)) continue;
    owners += (owners.empty() ? ": it is an option of " : ", ") + job.name;
  }
  return fmt::format("{}; see {} --help", owners, call);
}

[[noreturn]] void refuse(const OptionTable& table, const std::vector<std::string>& extras,
                         const Program* program, bool is_predict) {
  const auto option = std::ranges::find_if(
      extras, [](const std::string& arg) { return arg.size() > 1 && arg[0] == '-'; });
  if (option == extras.end()) {
    invalid("unexpected argument '{}': every option begins with --", extras.front());
  }
  std::vector<std::string> names;
  for (const Option& each : table) {
    if (!each.hidden) names.push_back(each.name);
  }
  const std::string name = named_in(*option);
  const auto meant = base::did_you_mean(name, names);
  std::string hint = program ? hint_of(*program, table, name, is_predict) : "";
  if (meant && !hint.starts_with(':')) hint = fmt::format("; did you mean --{}?", *meant);
  invalid("unknown option {}{}", option->substr(0, option->find('=')), hint);
}

/// Returns null if no option has this spelling.
const Option* find_by_spelling(const OptionTable& table, const std::string& spelling) {
  if (spelling.starts_with("--")) return find_option(table, named_in(spelling));
  for (const Option& option : table) {
    if (option.short_name && spelling == std::string("-") + option.short_name) return &option;
  }
  return nullptr;
}

/// Throws `invalid` for arguments that CLI11 would misread: it accepts an option as the value of
/// the option before it, and the argument after `--name=` as its value.
void check_values(const OptionTable& table, const std::vector<std::string>& args,
                  bool has_operand) {
  for (size_t i = 0; i < args.size(); ++i) {
    const size_t equals = args[i].find('=');
    const Option* option = find_by_spelling(table, args[i].substr(0, equals));
    if (!option) continue;
    const bool has_next = i + 1 < args.size();
    if (option->kind == ValueKind::kFlag) {
      if (equals != std::string::npos) invalid("--{} takes no value", option->name);
      if (has_next && !has_operand && !args[i + 1].starts_with('-')) {
        invalid("unexpected argument '{}': --{} takes no value", args[i + 1], option->name);
      }
      continue;
    }
    const bool missing = equals == std::string::npos ? !has_next || args[i + 1].starts_with("--")
                                                     : equals + 1 == args[i].size();
    if (missing) {
      invalid("--{} needs a value: {}", option->name, job::allowed_values(*option));
    }
    if (equals == std::string::npos) ++i;
  }
}

}  // namespace

ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args,
                            std::string* operand, const Program* program) {
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
    // The last value counts, so that a script can append options to a command line.
    app.add_option_function<std::string>(
           spellings(option),
           [&parsed, &option](const std::string& value) {
             parsed.set(option.name, canonical_value(option, value, "--" + option.name));
           })
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  check_values(table, args, operand != nullptr);
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 expects reverse order
  } catch (const CLI::ParseError& e) {
    invalid(e.what());
  }
  std::vector<std::string> extras = app.remaining();
  if (operand && !extras.empty() && (extras[0] == "-" || !extras[0].starts_with('-'))) {
    *operand = extras[0];
    extras.erase(extras.begin());
  }
  if (!extras.empty()) refuse(table, extras, program, operand != nullptr);
  return parsed;
}

}  // namespace distrain::app
