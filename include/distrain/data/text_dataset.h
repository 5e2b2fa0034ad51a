#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/data/vocabulary.h"

namespace distrain::data {

/// A training file's words, by first appearance, and its labels, sorted by bytes.
struct TextVocabulary {
  Vocabulary words;
  std::vector<std::string> labels;
};

/// Labelled bags of words. Example i is tokens[offsets[i] .. offsets[i + 1]) and may be empty.
struct TextDataset {
  std::vector<int64_t> tokens;                       ///< in [0, num_words())
  std::vector<int64_t> offsets;                      ///< size() + 1, rising
  std::vector<int64_t> labels;                       ///< size(), in [0, num_classes()); -1: none
  std::shared_ptr<const TextVocabulary> vocabulary;  ///< the training file's
  uint64_t content_hash = 0;                         ///< of the file's bytes
  int64_t dropped_tokens = 0;                        ///< words that the vocabulary does not have

  int64_t size() const { return static_cast<int64_t>(labels.size()); }
  int64_t num_words() const { return vocabulary->words.size(); }
  int64_t num_classes() const { return static_cast<int64_t>(vocabulary->labels.size()); }
};

/// Says whether each example must have a label. The class of one without is -1.
enum class Labels : uint8_t { kAll, kSome };

/// Reads a file in fastText's format, `__label__NAME token token …`, one example a line.
///
/// As in fastText, tokens are separated by blanks, tabs, \r, \v, \f or NUL, and may have any other
/// bytes. A line has one label, anywhere, unless labels are optional; it may have no token, which
/// makes an empty bag. Empty lines and a byte order mark are skipped.
///
/// With the `vocabulary` of a training file, unknown words are dropped and counted, and an unknown
/// label is an error.
///
/// Throws `bad_data`, with file and line, for a file that cannot be read, a line with no label or
/// with several, a label without a name, no example at all, or no word at all.
TextDataset read_fast_text(const std::string& path,
                           std::shared_ptr<const TextVocabulary> vocabulary = nullptr,
                           Labels labels = Labels::kAll);

/// As read_fast_text(), for bytes in memory; error messages show `name` as the path.
TextDataset parse_fast_text(std::string_view text, const std::string& name,
                            std::shared_ptr<const TextVocabulary> vocabulary = nullptr,
                            Labels labels = Labels::kAll);

}  // namespace distrain::data
