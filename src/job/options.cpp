#include "distrain/job/options.h"

#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace distrain::job {

namespace {

using base::invalid;
using base::number;
using base::shortest;

/// Describes the allowed range: " from 1 to 65535", " of 1 or more", " above 0 and up to 1000000".
std::string range_words(const Option& option) {
  const std::string min = fmt::format("{:.16g}", option.min);
  const std::string max = fmt::format("{}{:.16g}", option.below_max ? "below " : "", option.max);
  const bool open = option.max >= 9e18;
  if (open) return option.above_min ? " above " + min : " of " + min + " or more";
  return option.above_min ? fmt::format(" above {} and up to {}", min, max)
                          : fmt::format(" from {} to {}", min, max);
}

/// Returns `text` as a number. Throws `invalid`, with `where`, if the option does not accept it.
template <class T>
T checked_number(const Option& option, std::string_view text, std::string_view where) {
  std::optional<T> value = number<T>(text);
  if (option.is_duration) value = base::duration(text);
  const double real = value ? static_cast<double>(*value) : NAN;
  const bool above = option.above_min ? real > option.min : real >= option.min;
  const bool below = option.below_max ? real < option.max : real <= option.max;
  if (above && below && std::isfinite(real)) return *value;
  invalid(fmt::format("{} must be {}, not '{}'", where, allowed_values(option), text));
}

}  // namespace

std::string json_name(const Option& option) {
  std::string name = option.name;
  std::ranges::replace(name, '-', '_');
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
  if (option.kind == ValueKind::kFlag) return "true or false";
  if (option.kind == ValueKind::kChoice) return "one of " + words;
  if (option.kind == ValueKind::kText) return option.value_name;
  if (option.is_duration) {
    return fmt::format("a time{} s, such as 60, 50ms, 5m or 2h", range_words(option));
  }
  return fmt::format("{}{}{}{}", words, words.empty() ? "" : " or ",
                     option.kind == ValueKind::kReal ? "a number" : "a whole number",
                     range_words(option));
}

std::string canonical_value(const Option& option, std::string_view text, std::string_view where) {
  const bool is_word = std::ranges::find(option.choices, text) != option.choices.end();
  switch (option.kind) {
    case ValueKind::kFlag:
      if (text == "true" || text == "false") break;
      invalid(fmt::format("{} must be {}, not '{}'", where, allowed_values(option), text));
    case ValueKind::kInteger:
      if (is_word) break;
      return std::to_string(checked_number<int64_t>(option, text, where));
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
      if (is_word) break;
      const double value = checked_number<double>(option, text, where);
      return !option.choices.empty() && value == 0 ? "off" : shortest(value);
    }
    case ValueKind::kChoice: {
      if (is_word) break;
      const auto meant = base::did_you_mean(text, option.choices);
      invalid(fmt::format("{} must be {}, not '{}'{}", where, allowed_values(option), text,
                          meant ? fmt::format("; did you mean {}?", *meant) : ""));
    }
    case ValueKind::kText:
      if (!text.empty() || (option.may_be_empty && !option.initial.empty())) break;
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
  // The value of a number option may be a word such as "auto", which becomes a JSON text.
  const auto or_word = [&](auto value) { return value ? Json(*value) : Json(canonical); };
  if (option.kind == ValueKind::kInteger) return or_word(number<int64_t>(canonical));
  if (option.kind == ValueKind::kReal) return or_word(number<double>(canonical));
  return canonical;
}

ParsedOptions ParsedOptions::adopting(const OptionMap& of_rank_0) const {
  ParsedOptions adopted = *this;
  for (const Option& option : *table_) {
    const auto it = of_rank_0.find(option.name);
    if (!is_job_option(option) || it == of_rank_0.end()) continue;
    if (option.scope == Scope::kInput && given(option.name)) continue;
    if (!it->second.empty() || !(option.initial.empty() || option.each_own)) {
      adopted.set(option.name, canonical_value(option, it->second, "rank 0's --" + option.name),
                  "rank 0");
    } else if (!given(option.name)) {  // undoes a default derived from this rank's options
      adopted.derive(option.name, option.initial);
    }
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

}  // namespace distrain::job
