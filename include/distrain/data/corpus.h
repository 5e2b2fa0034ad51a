#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/vocabulary.h"

namespace distrain::data {

/// Words of each vocabulary. The words of the text follow by falling frequency, equally frequent
/// ones by first appearance.
inline constexpr int64_t kUnknownWord = 0;
inline constexpr int64_t kEndOfLine = 1;

/// Text as word numbers, `<eos>` after each line.
struct Corpus {
  std::vector<int64_t> tokens;
  uint64_t content_hash = 0;  ///< of the file's bytes

  /// The words of each line, without its end.
  std::vector<std::vector<int64_t>> lines() const;
};

/// Reads the words of a text file: at most `max_words` with `<unk>` and `<eos>`; 0: all. Separates
/// words as read_fast_text(). Throws `bad_data`, with the file, if it cannot be read or has no
/// word, `invalid` for a `max_words` of 1 or less than 0.
Vocabulary read_words(const std::string& path, int64_t max_words);

/// Reads a text with a vocabulary of read_words(), and throws as that does. Skips empty lines.
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
  /// Columns [first, first + count) of `columns`. `tokens` must outlive this object. Throws
  /// `bad_data` if a column has fewer than two tokens, `invalid` if there are no such columns.
  TokenColumns(const std::vector<int64_t>& tokens, int64_t columns, int64_t first, int64_t count);

  int64_t count() const { return count_; }
  /// Returns the number of batches of at most `length` words a column.
  int64_t steps(int64_t length) const;

  struct Batch {
    at::Tensor inputs;   ///< int64 [length, count]
    at::Tensor targets;  ///< int64 [length · count]: each word's next
  };
  Batch batch(int64_t step, int64_t length) const;

 private:
  const std::vector<int64_t>& tokens_;
  int64_t column_length_;
  int64_t first_;
  int64_t count_;
};

}  // namespace distrain::data
