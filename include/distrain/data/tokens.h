#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/text.h"

namespace distrain::data {

// Reads texts as numbers of their words, from memory or from files that are larger than memory.
//
//   WordCounts counts(10'000);
//   const TokenIndex index = index_text("train.txt", [&](auto word) { counts.add(word); });
//   const Vocabulary words = counts.most_frequent();
//   const TokensPtr tokens = open_tokens("train.txt", words, index);
//   TokenColumns(*tokens, 20, 0, 20).batch(0, 35);
//
// A text has the words of each line that has any, followed by `<eos>`. Words are separated as in
// read_fast_text(). Empty lines and a byte order mark are skipped. A `.bin` file has numbers of
// tokens without a header, little-endian, of 2 or 4 bytes each.

/// A sequence of token numbers.
class Tokens {
 public:
  Tokens(int64_t size, uint64_t content_hash) : size_(size), content_hash_(content_hash) {}
  virtual ~Tokens() = default;

  int64_t size() const { return size_; }
  /// Returns the hash of the file's (decompressed) bytes; 0 if the tokens are not from a file.
  uint64_t content_hash() const { return content_hash_; }

  /// Copies out.size() tokens, from token `first` on. All of them must exist. Threads may call it
  /// at the same time. Throws `bad_data` if the file cannot be read or has changed.
  virtual void read(int64_t first, std::span<int64_t> out) const = 0;

 private:
  const int64_t size_;
  const uint64_t content_hash_;
};
using TokensPtr = std::shared_ptr<const Tokens>;

/// Calls `function` with the words of each line of a text, without `<eos>`. Reads in pieces.
void for_each_line(const Tokens& tokens, const Vocabulary& vocabulary,
                   const std::function<void(const std::vector<int64_t>& line)>& function);

/// Returns tokens in memory.
TokensPtr make_tokens(std::vector<int32_t> tokens, uint64_t content_hash = 0);

/// Returns `count` random words of a vocabulary of `words`. They depend only on the arguments.
TokensPtr random_tokens(uint64_t seed, int64_t words, int64_t count);

/// Facts about a file that take a pass over all its bytes. One trainer finds them for all.
struct TokenIndex {
  static constexpr int64_t kInterval = 1024;

  int width = 0;  ///< bytes of a token in a `.bin` file; 0: a text
  uint64_t bytes = 0;
  uint64_t content_hash = 0;
  uint64_t head_hash = 0;  ///< of the first 64 KiB
  int64_t tokens = 0;
  /// int64 [⌈tokens / kInterval⌉]: the byte at which each kInterval-th token of a text begins;
  /// undefined for a `.bin` file.
  at::Tensor offsets;
  static constexpr auto kFields =
      std::tuple(&TokenIndex::width, &TokenIndex::bytes, &TokenIndex::content_hash,
                 &TokenIndex::head_hash, &TokenIndex::tokens, &TokenIndex::offsets);
};

/// The limit for bytes of a text that is compressed with gzip, when it is decompressed.
inline constexpr uint64_t kAnySize = std::numeric_limits<uint64_t>::max();

/// Called with each word of a text and, at the end of a line, with an empty view.
using OnWord = std::function<void(std::string_view word)>;

/// Reads a regular file in pieces. Throws `bad_data` if it cannot be read, is not a text, has no
/// word, has a word of 1 MiB or more, or is longer than `max_unpacked` bytes and compressed.
TokenIndex index_text(const std::string& path, const OnWord& on_word = {},
                      uint64_t max_unpacked = kAnySize);
/// Reads a `.bin` file with tokens of `width` bytes in pieces. Throws `bad_data` if the file cannot
/// be read, is empty, has a part of a token, or has a token that is not in [0, words).
TokenIndex index_bin(const std::string& path, int width, int64_t words);

/// Returns the tokens of an indexed file, which is not compressed. Tokens::read() reads the file,
/// and only the index is in memory. `vocabulary` must outlive the tokens. Throws `bad_data` if the
/// file's size or first 64 KiB are not those of the indexed file. Tokens::read() throws `bad_data`
/// if a `.bin` file has a token that is not in the vocabulary.
TokensPtr open_tokens(const std::string& path, const Vocabulary& vocabulary, TokenIndex index);

/// Reads a text, which may come from a pipe, into memory. Throws as index_text(). If `vocabulary`
/// is one of number_words(), throws `bad_data` for an unknown word, and lines end with -1.
TokensPtr load_text(const std::string& path, const Vocabulary& vocabulary,
                    uint64_t max_unpacked = kAnySize);

/// The first two words of each vocabulary of a text. The words of the text follow, sorted by
/// falling frequency; equally frequent words are in the order of their first appearance.
inline constexpr int64_t kUnknownWord = 0;
inline constexpr int64_t kEndOfLine = 1;

/// Counts the words of a text.
class WordCounts {
 public:
  static constexpr int64_t kBounded = 1 << 19;

  /// The vocabulary will have at most `max_words` words, with `<unk>` and `<eos>`, or all words if
  /// `max_words` is 0. To bound the memory, keeps the more frequent half of the words whenever
  /// there are more than `max_counted` (and twice `max_words`) different words; a word that was
  /// dropped and appears again is counted from 1. Throws `invalid` if `max_words` is 1 or below 0.
  explicit WordCounts(int64_t max_words, int64_t max_counted = kBounded);

  /// Counts a word. Ignores an empty one, the end of a line.
  void add(std::string_view word);
  Vocabulary most_frequent() const;

 private:
  std::vector<int64_t> by_count(int64_t count) const;

  const int64_t max_words_;
  const int64_t max_counted_;
  Vocabulary seen_;  // by first appearance
  std::vector<int64_t> counts_;
};

/// Returns the vocabulary of `.bin` files, whose words are the numbers "0", "1", … as text.
Vocabulary number_words(int64_t words);
/// Returns true if kUnknownWord and kEndOfLine have their meaning: not in `.bin` files.
bool has_reserved_words(const Vocabulary& vocabulary);

/// Returns the words of `text` (a prompt), without `<eos>`. Throws `bad_data` if the vocabulary is
/// one of number_words() and does not have a word.
std::vector<int64_t> to_tokens(std::string_view text, const Vocabulary& vocabulary);

/// Tokens in columns that are read side by side, as by batchify() of PyTorch's word language model:
/// column c of C has the tokens [c * n, (c + 1) * n) with n = tokens / C, and the rest is unused. A
/// trainer reads some of the columns.
class TokenColumns {
 public:
  /// Selects [first, first + count) of `columns` columns. `tokens` must outlive this object. Throws
  /// `bad_data` if a column has fewer than two tokens, `invalid` if a column does not exist.
  TokenColumns(const Tokens& tokens, int64_t columns, int64_t first, int64_t count);

  /// Returns the number of batches, each of which has at most `length` words of every column.
  int64_t steps(int64_t length) const;

  struct Batch {
    at::Tensor inputs;   ///< int64 [length, count]
    at::Tensor targets;  ///< int64 [length · count]: the word after each input
  };
  Batch batch(int64_t step, int64_t length) const;

 private:
  const Tokens& tokens_;
  int64_t column_length_;
  int64_t first_;
  int64_t count_;
};

}  // namespace distrain::data
