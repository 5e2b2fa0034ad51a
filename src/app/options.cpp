#include "distrain/app/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/base/error.h"

namespace distrain::app {
namespace {

[[noreturn]] void invalid(std::string message) {
  throw base::Exception(base::ErrorKind::kInvalid, std::move(message));
}

template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

std::string shortest(double value) {
  char text[64];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, end);
}

/// " from 1 to 65535", " of 1 or more", " above 0 and up to 1e+06", " from 0 to below 1".
std::string range_words(const Option& option) {
  const std::string min = shortest(option.min);
  const std::string max = (option.below_max ? "below " : "") + shortest(option.max);
  const bool open = option.max >= 9e18;
  if (option.above_min) {
    return open ? fmt::format(" above {}", min) : fmt::format(" above {} and up to {}", min, max);
  }
  if (open) return fmt::format(" of {} or more", min);
  return fmt::format(" from {} to {}", min, max);
}

void check_range(const Option& option, double value, std::string_view text, std::string_view where,
                 std::string_view what) {
  const bool low = option.above_min ? value <= option.min : value < option.min;
  const bool high = option.below_max ? value >= option.max : value > option.max;
  if (low || high) {
    invalid(fmt::format("{} must be {}{}, not {}", where, what, range_words(option), text));
  }
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row.back();
}

std::string spellings(const Option& option) {
  std::string names = "--" + option.name;
  // As the tutorials have it.
  if (option.name.find('-') != std::string::npos) names += ",--" + json_name(option);
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
    if (const auto meant = did_you_mean(named_in(*unknown), names)) {
      message += fmt::format("; did you mean --{}?", *meant);
    }
  }
  invalid(std::move(message));
}

std::vector<int64_t> to_integers(std::string_view canonical) {
  std::vector<int64_t> values;
  for (const std::string& part : split_list(canonical)) {
    values.push_back(number<int64_t>(part).value_or(0));
  }
  return values;
}

}  // namespace

std::string json_name(const Option& option) {
  std::string name = option.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    parts.emplace_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

const Option* find_option(const OptionTable& table, std::string_view name) {
  const auto it = std::find_if(table.begin(), table.end(),
                               [name](const Option& option) { return option.name == name; });
  return it == table.end() ? nullptr : &*it;
}

std::string canonical_value(const Option& option, std::string_view text, std::string_view where) {
  switch (option.kind) {
    case ValueKind::kFlag:
      return text == "false" ? "false" : "true";
    case ValueKind::kInteger: {
      const auto value = number<int64_t>(text);
      if (!value) invalid(fmt::format("{} must be a whole number, not '{}'", where, text));
      check_range(option, static_cast<double>(*value), text, where, "a whole number");
      return fmt::format("{}", *value);
    }
    case ValueKind::kIntegers: {
      Option one = option;
      one.kind = ValueKind::kInteger;
      std::vector<std::string> values;
      for (const std::string& part : split_list(text)) {
        values.push_back(canonical_value(one, part, where));
      }
      return fmt::format("{}", fmt::join(values, ","));
    }
    case ValueKind::kReal: {
      const auto value = number<double>(text);
      if (!value || !std::isfinite(*value)) {
        invalid(fmt::format("{} must be a finite number, not '{}'", where, text));
      }
      check_range(option, *value, text, where, "a number");
      return shortest(*value);
    }
    case ValueKind::kChoice: {
      if (std::find(option.choices.begin(), option.choices.end(), text) == option.choices.end()) {
        std::string message = fmt::format("{} must be one of {}, not '{}'", where,
                                          fmt::join(option.choices, ", "), text);
        if (const auto meant = did_you_mean(text, option.choices)) {
          message += fmt::format("; did you mean {}?", *meant);
        }
        invalid(std::move(message));
      }
      return std::string(text);
    }
    case ValueKind::kText:
      break;
  }
  if (text.empty()) invalid(fmt::format("{} needs a value", where));
  return std::string(text);
}

Json json_value(const Option& option, const std::string& canonical) {
  switch (option.kind) {
    case ValueKind::kInteger:
      return number<int64_t>(canonical).value_or(0);
    case ValueKind::kIntegers:
      return to_integers(canonical);
    case ValueKind::kReal:
      return number<double>(canonical).value_or(0);
    case ValueKind::kFlag:
      return canonical == "true";
    default:
      return canonical.empty() ? Json() : Json(canonical);
  }
}

std::optional<std::string> did_you_mean(std::string_view word,
                                        const std::vector<std::string>& candidates) {
  std::optional<std::string> best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance && distance < candidate.size()) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string ParsedOptions::text(std::string_view name) const {
  const std::string key(name);
  if (const auto it = values_.find(key); it != values_.end()) return it->second;
  if (const auto it = derived_.find(key); it != derived_.end()) return it->second;
  const Option* option = find_option(*table_, name);
  return option ? option->initial : std::string();
}

int64_t ParsedOptions::integer(std::string_view name) const {
  return number<int64_t>(text(name)).value_or(0);
}

std::vector<int64_t> ParsedOptions::integers(std::string_view name) const {
  return to_integers(text(name));
}

double ParsedOptions::real(std::string_view name) const {
  return number<double>(text(name)).value_or(0);
}

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
