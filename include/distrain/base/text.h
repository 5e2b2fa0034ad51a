#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace distrain::base {

/// Parses all of `text` as a number; returns nothing if it is malformed or out of range.
template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Parses a number of bytes, such as "512", "256MB" (10⁶) or "2GiB" (2³⁰). Returns nothing if
/// `text` is malformed or above 2⁶².
std::optional<int64_t> byte_count(std::string_view text);

/// Parses a time, such as "60", "1.5s", "50ms" or "2h", to seconds; returns nothing if malformed.
std::optional<double> duration(std::string_view text);

/// Returns the shortest text that number() parses to exactly `value`.
std::string shortest(double value);
/// Splits `text` into parts that point into it: "a,b" by ',' gives "a" and "b"; "" gives "".
std::vector<std::string_view> split(std::string_view text, char by);
/// Returns the candidate nearest to `word`, if `word` is probably a typo of it.
std::optional<std::string> did_you_mean(std::string_view word,
                                        const std::vector<std::string>& candidates);

/// Returns `text` for a message: in quotes, on one line, truncated to about 40 characters.
std::string in_quotes(std::string_view text);

}  // namespace distrain::base
