#include "text.h"

namespace distrain::data {

std::string in_quotes(std::string_view text) {
  constexpr size_t kShown = 40;
  std::string shown = "'";
  for (const char c : text.substr(0, kShown)) {
    const bool plain = static_cast<unsigned char>(c) >= 0x20 && c != 0x7F;
    shown += plain ? c : '?';
  }
  // A message is UTF-8: a character that the limit cut in two goes.
  if (text.size() > kShown) {
    while (shown.size() > 1 && (shown.back() & 0xC0) == 0x80) shown.pop_back();
    if (shown.size() > 1 && (shown.back() & 0x80) != 0) shown.pop_back();
    shown += "…";
  }
  return shown + "'";
}

}  // namespace distrain::data
