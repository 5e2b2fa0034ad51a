#include "options.h"

#include <algorithm>
#include <utility>

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
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

/// Returns "; see distrain ps --help" for the command that has `table`, after the jobs that have
/// the option `name`, if any.
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

[[noreturn]] void refuse(const OptionTable& table, const std::string& arg, const Program* program,
                         bool is_predict) {
  std::vector<std::string> names;
  for (const Option& each : table) {
    if (!each.hidden) names.push_back(each.name);
  }
  const std::string name = named_in(arg);
  const auto meant = base::did_you_mean(name, names);
  std::string hint = program ? hint_of(*program, table, name, is_predict) : "";
  if (meant && !hint.starts_with(':')) hint = fmt::format("; did you mean --{}?", *meant);
  invalid(fmt::format("unknown option {}{}", arg.substr(0, arg.find('=')), hint));
}

/// Returns null if no option is spelled so.
const Option* find_by_spelling(const OptionTable& table, const std::string& spelling) {
  if (spelling.starts_with("---")) return nullptr;
  if (spelling.starts_with("--")) return find_option(table, named_in(spelling));
  const auto it = std::ranges::find_if(table, [&](const Option& option) {
    return option.short_name && spelling == std::string("-") + option.short_name;
  });
  return it == table.end() ? nullptr : &*it;
}

}  // namespace

ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args,
                            std::string* operand, const Program* program) {
  ParsedOptions parsed(table);
  bool has_operand = false;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg.size() < 2 || arg[0] != '-') {
      if (!operand || std::exchange(has_operand, true)) {
        invalid(fmt::format("unexpected argument '{}': every option begins with --", arg));
      }
      *operand = arg;
      continue;
    }
    const size_t equals = arg.find('=');
    const Option* const option = find_by_spelling(table, arg.substr(0, equals));
    if (!option) refuse(table, arg, program, operand != nullptr);
    const std::string* const next = i + 1 < args.size() ? &args[i + 1] : nullptr;
    if (option->kind == ValueKind::kFlag) {
      if (equals != arg.npos) invalid(fmt::format("--{} takes no value", option->name));
      if (next && !operand && !next->starts_with('-')) {
        invalid(fmt::format("unexpected argument '{}': --{} takes no value", *next, option->name));
      }
      parsed.set(option->name, "true");
      continue;
    }
    // Another option is not taken as the value of this one.
    const bool missing =
        equals == arg.npos ? !next || next->starts_with("--") : equals + 1 == arg.size();
    if (missing) {
      invalid(fmt::format("--{} needs a value: {}", option->name, job::allowed_values(*option)));
    }
    const std::string value = equals == arg.npos ? args[++i] : arg.substr(equals + 1);
    // The last one holds, so that a sweep can append to a command line.
    parsed.set(option->name, canonical_value(*option, value, "--" + option->name));
  }
  return parsed;
}

}  // namespace distrain::app
