#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

namespace distrain::data {

/// Strings numbered from 0 in the order of their first add().
class Vocabulary {
 public:
  static constexpr int64_t kUnknown = -1;

  Vocabulary() = default;
  /// Adds `words` in their order.
  explicit Vocabulary(const std::vector<std::string>& words);
  Vocabulary(Vocabulary&&) = default;
  Vocabulary& operator=(Vocabulary&&) = default;

  /// Returns the number of `word`. Adds `word` if it is new.
  int64_t add(std::string_view word);

  /// Returns the number of `word`, or kUnknown.
  int64_t find(std::string_view word) const;

  /// Returns the word with the number `id`. The view is valid as long as this object.
  std::string_view word(int64_t id) const { return words_[static_cast<size_t>(id)]; }

  int64_t size() const { return std::ssize(words_); }
  /// Returns all words in the order of their numbers.
  std::vector<std::string> all() const { return {words_.begin(), words_.end()}; }

 private:
  std::deque<std::string> words_;                      // by number; never moves its elements
  ska::flat_hash_map<std::string_view, int64_t> ids_;  // by word; its keys are views of `words_`
};

/// The words of a training file, numbered by first appearance, and its labels, sorted by bytes.
struct TextVocabulary {
  Vocabulary words;
  std::vector<std::string> labels;
  /// If not 0, at most 62: words are numbered by this many bits of their store::content_hash(), so
  /// that no word is unknown, and `words` is empty.
  int hash_bits = 0;

  int64_t num_words() const { return hash_bits > 0 ? int64_t{1} << hash_bits : words.size(); }
};

/// Labelled bags of words. Example i is tokens[offsets[i] .. offsets[i + 1]) and may be empty.
struct TextDataset {
  std::vector<int64_t> tokens;                       ///< in [0, num_words())
  std::vector<int64_t> offsets;                      ///< size() + 1, rising
  std::vector<int64_t> labels;                       ///< size(), in [0, num_classes()); -1: none
  std::shared_ptr<const TextVocabulary> vocabulary;  ///< the training file's
  uint64_t content_hash = 0;                         ///< of the (decompressed) file's bytes
  int64_t dropped_tokens = 0;                        ///< words that the vocabulary does not have

  int64_t size() const { return static_cast<int64_t>(labels.size()); }
  int64_t num_words() const { return vocabulary->num_words(); }
  int64_t num_classes() const { return static_cast<int64_t>(vocabulary->labels.size()); }
};

/// kAll requires a label of each example. With kSome, the class of an unlabelled example is -1.
enum class Labels : uint8_t { kAll, kSome };

/// Reads a file in fastText's format, `__label__NAME token token …`, one example a line.
///
/// As in fastText, tokens are separated by blanks, tabs, \r, \v, \f or NUL, and may have any other
/// bytes. A line has one label, anywhere, unless labels are optional; it may have no token, which
/// makes an empty bag. Empty lines and a byte order mark are skipped.
///
/// With the `vocabulary` of a training file, unknown words are dropped and counted, and an unknown
/// label is an error. Without it, the dataset gets a vocabulary with this `hash_bits`. The file may
/// be compressed with gzip.
///
/// Throws `bad_data`, with file and line, for a file that cannot be read, a line with no label or
/// with several, a label without a name, no example at all, or no word at all.
TextDataset read_fast_text(const std::string& path,
                           std::shared_ptr<const TextVocabulary> vocabulary = nullptr,
                           Labels labels = Labels::kAll, int hash_bits = 0);

/// Does the same as read_fast_text() for bytes in memory. Error messages show `name` as the path.
TextDataset parse_fast_text(std::string_view text, const std::string& name,
                            std::shared_ptr<const TextVocabulary> vocabulary = nullptr,
                            Labels labels = Labels::kAll, int hash_bits = 0);

/// The first two words of each vocabulary of read_words(). The words of the text follow, sorted by
/// falling frequency; equally frequent words are in the order of their first appearance.
inline constexpr int64_t kUnknownWord = 0;
inline constexpr int64_t kEndOfLine = 1;

/// A text as the numbers of its words, with `<eos>` after each line.
struct Corpus {
  std::vector<int64_t> tokens;
  uint64_t content_hash = 0;  ///< of the (decompressed) file's bytes

  /// Returns the words of each line, without `<eos>`.
  std::vector<std::vector<int64_t>> lines() const;
};

/// Returns the vocabulary of a text file: at most `max_words` words, with `<unk>` and `<eos>`, or
/// all words if it is 0. Separates words, and reads gzip, as read_fast_text(). Throws `bad_data` if
/// the file cannot be read or has no word, and `invalid` if `max_words` is 1 or below 0.
Vocabulary read_words(const std::string& path, int64_t max_words);

/// Reads a text with a vocabulary of read_words(). Skips empty lines. Throws as read_words().
Corpus read_corpus(const std::string& path, const Vocabulary& vocabulary);

/// Returns `count` random words of a vocabulary of `words`. They depend only on the arguments.
Corpus random_corpus(uint64_t seed, int64_t words, int64_t count);

/// Returns the words of `text` (a prompt), without `<eos>`.
std::vector<int64_t> to_tokens(std::string_view text, const Vocabulary& vocabulary);

/// A corpus in columns that are read side by side, as by batchify() of PyTorch's word language
/// model: column c of C holds the tokens [c * n, (c + 1) * n) with n = tokens / C, and the rest is
/// unused. A trainer reads some of the columns.
class TokenColumns {
 public:
  /// Selects [first, first + count) of `columns` columns. `tokens` must outlive this object. Throws
  /// `bad_data` if a column has fewer than two tokens, `invalid` if a column does not exist.
  TokenColumns(const std::vector<int64_t>& tokens, int64_t columns, int64_t first, int64_t count);

  int64_t count() const { return count_; }
  /// Returns the number of batches, each of which has at most `length` words of every column.
  int64_t steps(int64_t length) const;

  struct Batch {
    at::Tensor inputs;   ///< int64 [length, count]
    at::Tensor targets;  ///< int64 [length · count]: the word after each input
  };
  Batch batch(int64_t step, int64_t length) const;

 private:
  const std::vector<int64_t>& tokens_;
  int64_t column_length_;
  int64_t first_;
  int64_t count_;
};

}  // namespace distrain::data
