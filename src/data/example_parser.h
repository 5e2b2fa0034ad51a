#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/data/stream.h"
#include "distrain/data/text.h"

namespace distrain::data {

/// Thrown for a line that is no example.
struct BadRow {
  size_t at = 0;  ///< the byte of the line that is wrong
  std::string reason{};
};

/// The separators of words within a line, as in fastText.
inline constexpr std::array<bool, 256> kSeparators = [] {
  std::array<bool, 256> table{};
  for (const unsigned char c : {' ', '\t', '\r', '\v', '\f', '\0'}) table[c] = true;
  return table;
}();

inline bool is_separator(char c) { return kSeparators[static_cast<unsigned char>(c)]; }

/// Returns the first separator in [at, end), or `end`. Looks at 8 bytes at once.
inline const char* find_separator(const char* at, const char* end) {
  constexpr uint64_t kOnes = 0x0101010101010101, kHigh = 0x80 * kOnes;
  while (end - at >= 8) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, at, sizeof bytes);
    // The high bit of each byte that is at most ' '. Only these can be separators.
    const uint64_t low = ~(((bytes & ~kHigh) + (0x7F - ' ') * kOnes) | bytes) & kHigh;
    at += std::countr_zero(low) / 8;  // 8 if there is none
    if (low == 0) continue;
    if (is_separator(*at)) return at;
    ++at;
  }
  while (at < end && !is_separator(*at)) ++at;
  return at;
}

void for_each_token(std::string_view line, auto function) {
  const char* at = line.data();
  const char* const end = at + line.size();
  for (;;) {
    while (at < end && is_separator(*at)) ++at;
    if (at == end) return;
    const char* const begin = at;
    at = find_separator(at, end);
    function(std::string_view(begin, static_cast<size_t>(at - begin)));
  }
}

/// The parts of a line in fastText's format. They point into the line.
struct FastTextLine {
  std::optional<std::string_view> label{};  ///< without `__label__`; not empty
  std::vector<std::string_view> words{};

  /// Replaces the parts by those of `line`. Returns false for a line without any token. Throws
  /// BadRow for several labels, for a label without a name, or for no label if `labels` is kAll.
  bool split(std::string_view line, Labels labels);
};

/// Returns the number of a word, or Vocabulary::kUnknown.
int64_t number_of_word(std::string_view word, const TextVocabulary& vocabulary);
/// Returns the number of `label`, which is a part of `line`. Throws BadRow if it is unknown.
int64_t number_of_label(std::string_view label, std::string_view line,
                        const TextVocabulary& vocabulary);

/// Collects the words and labels of a training text.
class VocabularyBuilder {
 public:
  explicit VocabularyBuilder(int hash_bits) { vocabulary_.hash_bits = hash_bits; }

  /// Returns the number of a word, which may be new.
  int64_t add_word(std::string_view word) {
    return vocabulary_.hash_bits > 0 ? number_of_word(word, vocabulary_)
                                     : vocabulary_.words.add(word);
  }
  /// Returns a number for a label, which may be new: 0 for the first label.
  int64_t add_label(std::string_view label) {
    const auto found = labels_.find(label);
    if (found != labels_.end()) return found->second;
    return labels_.emplace(label, std::ssize(labels_)).first->second;
  }

  /// Returns the vocabulary. Sets `classes`, if not null, to the class of each label's number.
  /// Classes are numbered by name, so that they do not depend on the order of the lines.
  TextVocabulary finish(std::vector<int64_t>* classes = nullptr);

 private:
  TextVocabulary vocabulary_;
  std::map<std::string, int64_t, std::less<>> labels_;
};

/// Appends an example with these words and this label. `number_of` returns the number of a word, or
/// Vocabulary::kUnknown for a word to drop.
void append(Examples& out, const std::vector<std::string_view>& words, int64_t label,
            auto number_of) {
  for (const std::string_view word : words) {
    const int64_t number = number_of(word);
    if (number == Vocabulary::kUnknown) {
      ++out.dropped_tokens;
    } else {
      out.tokens.push_back(number);
    }
  }
  out.labels.push_back(label);
  out.offsets.push_back(std::ssize(out.tokens));
}

/// Appends lines to Examples.
class ExampleParser {
 public:
  ExampleParser(Format format, std::shared_ptr<const TextVocabulary> vocabulary);

  /// Appends the example of `line`. Returns false for an empty line. Throws BadRow, and leaves
  /// `out` as it was, if the line is no example.
  bool parse(std::string_view line, Examples& out);

 private:
  bool parse_fast_text(std::string_view line, Examples& out);
  bool parse_criteo(std::string_view line, Examples& out);

  const Format format_;
  const std::shared_ptr<const TextVocabulary> vocabulary_;
  FastTextLine parts_;                     // of a line of fastText
  std::vector<std::string_view> fields_;   // of a line of Criteo
  std::vector<std::string> criteo_words_;  // the beginnings of the words of its fields
  std::string word_;                       // of a field
};

}  // namespace distrain::data
