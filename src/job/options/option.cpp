#include "distrain/job/option.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/base/error.h"
#include "distrain/job/options.h"

namespace distrain::job {
namespace {

using base::invalid;
using base::number;
using base::shortest;

/// Returns the range in words: " from 1 to 65535", " of 1 or more", " above 0 and up to 1000000".
std::string range_words(const Option& option) {
  const std::string min = fmt::format("{:.16g}", option.min);
  const std::string max = fmt::format("{}{:.16g}", option.below_max ? "below " : "", option.max);
  const bool open = option.max >= 9e18;
  if (option.above_min) {
    return open ? fmt::format(" above {}", min) : fmt::format(" above {} and up to {}", min, max);
  }
  if (open) return fmt::format(" of {} or more", min);
  return fmt::format(" from {} to {}", min, max);
}

/// Returns `text` as a number of the option's range. Throws `invalid` naming `where` otherwise.
template <class T>
T checked_number(const Option& option, std::string_view text, std::string_view where) {
  const std::optional<T> value = number<T>(text);
  const double real = value ? static_cast<double>(*value) : NAN;
  const bool above = option.above_min ? real > option.min : real >= option.min;
  const bool below = option.below_max ? real < option.max : real <= option.max;
  if (above && below && std::isfinite(real)) return *value;
  invalid(fmt::format("{} must be {}, not '{}'", where, allowed_values(option), text));
}

}  // namespace

std::string json_name(const Option& option) {
  std::string name = option.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

const Option* find_option(const OptionTable& table, std::string_view name) {
  for (const Option& option : table) {
    if (!name.empty() && (option.name == name || option.old_name == name)) return &option;
  }
  return nullptr;
}

std::string allowed_values(const Option& option) {
  const std::string words = fmt::format("{}", fmt::join(option.choices, ", "));
  if (option.kind == ValueKind::kChoice) return "one of " + words;
  if (option.kind == ValueKind::kText) return option.value_name;
  return fmt::format("{}{}{}{}", words, words.empty() ? "" : " or ",
                     option.kind == ValueKind::kReal ? "a number" : "a whole number",
                     range_words(option));
}

std::string canonical_value(const Option& option, std::string_view text, std::string_view where) {
  const bool is_word = std::ranges::find(option.choices, text) != option.choices.end();
  switch (option.kind) {
    case ValueKind::kFlag:
      return text == "false" ? "false" : "true";
    case ValueKind::kInteger:
      if (is_word) return std::string(text);
      return fmt::format("{}", checked_number<int64_t>(option, text, where));
    case ValueKind::kIntegers: {
      Option one = option;
      one.kind = ValueKind::kInteger;
      std::vector<std::string> values;
      for (const auto part : base::split(text, ',')) {
        values.push_back(canonical_value(one, part, where));
      }
      return detail::write_value(values);
    }
    case ValueKind::kReal: {
      if (is_word) return std::string(text);
      const double value = checked_number<double>(option, text, where);
      return !option.choices.empty() && value == 0 ? "off" : shortest(value);
    }
    case ValueKind::kChoice: {
      if (is_word) return std::string(text);
      std::string message =
          fmt::format("{} must be {}, not '{}'", where, allowed_values(option), text);
      if (const auto meant = base::did_you_mean(text, option.choices)) {
        message += fmt::format("; did you mean {}?", *meant);
      }
      invalid(std::move(message));
    }
    case ValueKind::kText:
      break;
  }
  const bool may_be_empty = option.may_be_empty && !option.initial.empty();
  if (text.empty() && !may_be_empty) {
    invalid(fmt::format("{} needs a value: {}", where, allowed_values(option)));
  }
  return std::string(text);
}

Json json_value(const Option& option, const std::string& canonical) {
  if (canonical.empty()) return Json();
  if (option.kind == ValueKind::kFlag) return canonical == "true";
  if (option.kind == ValueKind::kIntegers) {
    std::vector<int64_t> values;
    detail::read_value(canonical, values);
    return values;
  }
  if (option.kind == ValueKind::kInteger) {
    if (const auto value = number<int64_t>(canonical)) return *value;
  } else if (option.kind == ValueKind::kReal) {
    if (const auto value = number<double>(canonical)) return *value;
  }
  return canonical;  // a text, or a word that replaces a number
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

double ParsedOptions::real(std::string_view name) const {
  return number<double>(text(name)).value_or(0);
}

ParsedOptions ParsedOptions::adopting(const OptionMap& of_rank_0) const {
  ParsedOptions adopted = *this;
  for (const Option& option : *table_) {
    const auto it = of_rank_0.find(option.name);
    if (!is_job_option(option) || it == of_rank_0.end()) continue;
    if (option.scope == Scope::kInput && given(option.name)) continue;
    if (it->second.empty() && (option.initial.empty() || option.each_own)) {
      // Discards the value that this rank derived from its own options.
      if (!given(option.name)) adopted.derive(option.name, option.initial);
      continue;
    }
    adopted.set(option.name, canonical_value(option, it->second, "rank 0's --" + option.name));
  }
  return adopted;
}

void derive_limits(TrainerOptions& options, const ParsedOptions& parsed, int default_epochs) {
  const bool by_epochs = parsed.given("epochs"), by_steps = parsed.given("steps");
  if (by_steps && !by_epochs && options.steps > 0) options.epochs = 0;
  if (by_epochs && !by_steps) options.steps = 0;
  if (!by_epochs && options.epochs == 0 && options.steps == 0) options.epochs = default_epochs;
}

void RuleOptions::name_rules(OptionTable& table) {
  const Option* const optimizer = find_option(table, "optimizer");
  const auto offers = [&](const char* rule) {
    return !optimizer || std::ranges::count(optimizer->choices, rule) > 0;
  };
  std::string rules = offers("sgd") ? " for sgd" : "";
  if (offers("rmsprop")) rules += rules.empty() ? " for rmsprop" : " and rmsprop";
  for (Option& option : table) {
    std::string& decay = option.initial_in_words;
    if (decay.starts_with("0.01 for adamw") && !offers("adamw")) decay = "0";
    if (option.help.starts_with("set momentum for sgd")) option.help = "set momentum" + rules;
  }
}

optim::Sharing TrainerOptions::sharing(int participant) const {
  using Mode = optim::Sharing::Mode;
  optim::Sharing sharing;
  sharing.mode = mode == "sync" ? Mode::kSync : mode == "ssp" ? Mode::kSsp : Mode::kAsync;
  sharing.participants = trainers;
  sharing.participant = participant;
  sharing.staleness = staleness;
  return sharing;
}

}  // namespace distrain::job
