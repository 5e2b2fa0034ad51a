#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace distrain::base {

/// All of `text` as a number; none if it is none, or too big.
template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// The shortest text of which number() makes the same.
std::string shortest(double value);

/// "a,b" by ',' → "a" and "b"; an empty text is one empty part. Into `text`.
std::vector<std::string_view> split(std::string_view text, char by);

/// The nearest of `candidates`, if it is near enough to be what was meant.
std::optional<std::string> did_you_mean(std::string_view word,
                                        const std::vector<std::string>& candidates);

}  // namespace distrain::base
