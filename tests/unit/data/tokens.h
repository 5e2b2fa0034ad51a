#pragma once

#include <string>
#include <vector>

#include "distrain/data/tokens.h"

namespace distrain::data {

using Ints = std::vector<int64_t>;

inline Ints read(const Tokens& tokens, int64_t first, int64_t count) {
  Ints result(static_cast<size_t>(count));
  tokens.read(first, result);
  return result;
}

inline Vocabulary read_words(const std::string& path, int64_t max_words,
                             uint64_t max_unpacked = kAnySize) {
  WordCounts counts(max_words);
  index_text(
      path, [&](std::string_view word) { counts.add(word); }, max_unpacked);
  return counts.most_frequent();
}

inline Ints all(const Tokens& tokens) { return read(tokens, 0, tokens.size()); }

}  // namespace distrain::data
