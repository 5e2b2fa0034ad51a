#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "distrain/store/file.h"

namespace distrain::data {

inline constexpr std::array<bool, 256> kSeparators = [] {
  std::array<bool, 256> table{};
  for (const unsigned char c : {' ', '\t', '\r', '\v', '\f', '\0'}) table[c] = true;
  return table;
}();

/// What separates words within a line, as in fastText.
inline bool is_separator(char c) { return kSeparators[static_cast<unsigned char>(c)]; }

/// Calls `function` with each word of `line`.
void for_each_token(std::string_view line, auto function) {
  const char* at = line.data();
  const char* const end = at + line.size();
  for (;;) {
    while (at < end && is_separator(*at)) ++at;
    if (at == end) return;
    const char* const begin = at;
    while (at < end && !is_separator(*at)) ++at;
    function(std::string_view(begin, static_cast<size_t>(at - begin)));
  }
}

/// Calls `function` with each line of `text`, without its \n and without a UTF-8 byte order mark at
/// the beginning. The last line needs no \n.
void for_each_line(std::string_view text, auto function) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    function(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

/// Reads a whole text. Throws `bad_data` if the file is compressed, UTF-16 or binary.
std::string read_text(const store::InputFile& file);

}  // namespace distrain::data
