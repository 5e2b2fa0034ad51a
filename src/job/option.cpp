#include "distrain/job/option.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/base/error.h"
#include "distrain/job/option_list.h"

namespace distrain::job {
namespace {

using base::invalid;

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
  if (name.empty()) return nullptr;
  const auto it = std::find_if(table.begin(), table.end(), [name](const Option& option) {
    return option.name == name || option.old_name == name;
  });
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
  if (canonical.empty()) return Json();
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
      return canonical;
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
      // What this rank derived followed from its own options.
      if (!given(option.name)) adopted.derive(option.name, option.initial);
      continue;
    }
    adopted.set(option.name, canonical_value(option, it->second, "rank 0's --" + option.name));
  }
  return adopted;
}

namespace detail {

void read_value(const std::string& text, int& value) { value = number<int>(text).value_or(0); }
void read_value(const std::string& text, int64_t& value) {
  value = number<int64_t>(text).value_or(0);
}
void read_value(const std::string& text, uint64_t& value) {
  value = number<uint64_t>(text).value_or(0);
}
void read_value(const std::string& text, double& value) {
  value = number<double>(text).value_or(0);
}
void read_value(const std::string& text, std::string& value) { value = text; }
void read_value(const std::string& text, std::vector<int64_t>& value) { value = to_integers(text); }
void read_value(const std::string& text, std::vector<std::string>& value) {
  value = text.empty() ? std::vector<std::string>() : split_list(text);
}
void read_value(const std::string& text, bool& value, const char* yes, const char*) {
  value = text == yes;
}

std::string write_value(int64_t value) { return std::to_string(value); }
std::string write_value(uint64_t value) { return std::to_string(value); }
std::string write_value(double value) { return shortest(value); }
std::string write_value(const std::string& value) { return value; }
std::string write_value(const std::vector<int64_t>& value) {
  return fmt::format("{}", fmt::join(value, ","));
}
std::string write_value(const std::vector<std::string>& value) {
  return fmt::format("{}", fmt::join(value, ","));
}
std::string write_value(bool value, const char* yes, const char* no) { return value ? yes : no; }

}  // namespace detail

void refuse_unknown_option(std::string_view name) {
  throw base::Exception(base::ErrorKind::kInternal, "no option is named " + std::string(name));
}

}  // namespace distrain::job
