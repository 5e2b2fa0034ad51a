#include "distrain/base/text.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <numeric>
#include <tuple>

namespace distrain::base {
namespace {

// Returns the Levenshtein distance, ignoring case.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = std::tolower(static_cast<unsigned char>(a[i - 1])) ==
                        std::tolower(static_cast<unsigned char>(b[j - 1]));
      const size_t change = diagonal + (same ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row.back();
}

}  // namespace

std::optional<int64_t> byte_count(std::string_view text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const auto count = number<int64_t>(text.substr(0, digits));
  std::string_view unit = text.substr(digits);
  if (!count) return std::nullopt;
  int64_t factor = 1;
  if (!unit.empty()) {
    const size_t power = std::string_view("KMGT").find(unit.front());
    unit.remove_prefix(1);
    if (power == std::string_view::npos || (unit != "B" && unit != "iB")) return std::nullopt;
    for (size_t i = 0; i <= power; ++i) factor *= unit == "B" ? 1000 : 1024;
  }
  if (*count > std::numeric_limits<int64_t>::max() / factor) return std::nullopt;
  return *count * factor;
}

std::optional<double> duration(std::string_view text) {
  // Dividing by the last number rounds only once, so that "9ms" is 0.009.
  constexpr std::tuple<std::string_view, double, double> kUnits[] = {
      {"us", 1, 1e6}, {"ms", 1, 1e3}, {"s", 1, 1}, {"m", 60, 1}, {"h", 3600, 1}};
  for (const auto& [unit, times, per] : kUnits) {
    if (!text.ends_with(unit)) continue;
    const auto value = number<double>(text.substr(0, text.size() - unit.size()));
    return value ? std::optional(*value * times / per) : std::nullopt;
  }
  return number<double>(text);
}

std::string shortest(double value) {
  char text[64];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, end);
}

std::vector<std::string_view> split(std::string_view text, char by) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(by);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
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

std::string in_quotes(std::string_view text) {
  constexpr size_t kShown = 40;
  std::string shown = "'";
  for (const char c : text.substr(0, kShown)) {
    const bool plain = static_cast<unsigned char>(c) >= 0x20 && c != 0x7F;
    shown += plain ? c : '?';
  }
  // Drop a last UTF-8 character that the limit may have cut in two.
  if (text.size() > kShown) {
    while (shown.size() > 1 && (shown.back() & 0xC0) == 0x80) shown.pop_back();
    if (shown.size() > 1 && (shown.back() & 0x80) != 0) shown.pop_back();
    shown += "…";
  }
  return shown + "'";
}

}  // namespace distrain::base
