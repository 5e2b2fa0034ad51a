#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/vocabulary.h"

namespace distrain::data {

/// The words of a language model: number 0 is `<unk>`, 1 is `<eos>`, then the text's by falling
/// frequency (equal ones in the order of their first appearance).
inline constexpr int64_t kUnknownWord = 0;
inline constexpr int64_t kEndOfLine = 1;

/// Text as word numbers, `<eos>` after each line.
struct Corpus {
  std::vector<int64_t> tokens;
  uint64_t content_hash = 0;  ///< of the file's bytes

  /// The words of each line, without its end.
  std::vector<std::vector<int64_t>> lines() const;
};

/// The words of a text file: at most `max_words` with `<unk>` and `<eos>`, 0: all. Words are
/// separated as read_fast_text's are; empty lines are skipped. Throws `bad_data`, with the file:
/// one that cannot be read, or has no word; `invalid` for a `max_words` of 1 or less than 0.
Vocabulary read_words(const std::string& path, int64_t max_words);

/// Reads a text with a vocabulary of read_words. Throws as read_words.
Corpus read_corpus(const std::string& path, const Vocabulary& vocabulary);

/// So many words, each drawn from all of a vocabulary of `words`. They follow from the seed alone.
Corpus random_corpus(uint64_t seed, int64_t words, int64_t count);

/// The words of `text` (a prompt); no `<eos>`, lines or not.
std::vector<int64_t> to_tokens(std::string_view text, const Vocabulary& vocabulary);

/// A corpus folded into columns that are read side by side: column c of C holds the tokens
/// [c * n, (c + 1) * n) with n = tokens / C; what is left over at the end is not used. This is what
/// PyTorch's word language model calls batchify(). A trainer reads some of the columns.
class TokenColumns {
 public:
  /// Columns [first, first + count) of `columns`. `tokens` must outlive this object. Throws
  /// `bad_data` when a column would have fewer than two tokens, `invalid` for columns that are not.
  TokenColumns(const std::vector<int64_t>& tokens, int64_t columns, int64_t first, int64_t count);

  /// That are read.
  int64_t count() const { return count_; }
  /// Batches of at most `length` words a column, the last one shorter.
  int64_t steps(int64_t length) const;

  /// Of int64.
  struct Batch {
    at::Tensor inputs;   ///< [length, count]
    at::Tensor targets;  ///< [length · count]: each word's next
  };
  Batch batch(int64_t step, int64_t length) const;

 private:
  const std::vector<int64_t>& tokens_;
  int64_t column_length_;
  int64_t first_;
  int64_t count_;
};

}  // namespace distrain::data
