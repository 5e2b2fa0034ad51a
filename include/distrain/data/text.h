#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace distrain::data {

/// Strings numbered from 0 in the order of their first add().
class Vocabulary {
 public:
  static constexpr int64_t kUnknown = -1;

  Vocabulary() = default;
  /// Adds `words` in their order.
  explicit Vocabulary(const std::vector<std::string>& words) {
    for (const std::string& word : words) add(word);
  }
  Vocabulary(Vocabulary&&) = default;
  Vocabulary& operator=(Vocabulary&&) = default;

  /// Returns the number of `word`. Adds `word` if it is new.
  int64_t add(std::string_view word);

  /// Returns the number of `word`, or kUnknown.
  int64_t find(std::string_view word) const {
    if (slots_.empty()) return kUnknown;
    return int64_t{slots_[slot_of(slot_with(word), word)].position} - 1;
  }

  /// Returns the word with the number `id`. The view is valid as long as this object.
  std::string_view word(int64_t id) const { return words_[static_cast<size_t>(id)]; }

  int64_t size() const { return std::ssize(words_); }
  /// Returns all words in the order of their numbers.
  std::vector<std::string> all() const { return {words_.begin(), words_.end()}; }

 private:
  /// An entry of an open-addressing hash table with linear probing.
  struct Slot {
    uint64_t key = 0;       // the bytes of a word that has at most 8, otherwise a hash of them
    uint32_t size = 0;      // of the word, in bytes, or 2^32 - 1 if it is longer
    uint32_t position = 0;  // the word's number + 1; 0 if the slot is free
  };
  static Slot slot_with(std::string_view word);
  size_t slot_of(const Slot& wanted, std::string_view word) const;
  void grow();

  std::deque<std::string> words_;  // by number; never moves its elements
  std::vector<Slot> slots_;        // a power of 2; at least a quarter is free
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
struct Examples {
  std::vector<int64_t> tokens{};    ///< in [0, num_words()) of the vocabulary
  std::vector<int64_t> offsets{0};  ///< size() + 1, rising
  std::vector<int64_t> labels{};    ///< size(), numbers of TextVocabulary::labels; -1 if unlabelled
  std::vector<float> numbers{};     ///< kCriteoNumbers (batches.h) of each example, or empty
  int64_t dropped_tokens = 0;       ///< words that the vocabulary does not have

  int64_t size() const { return std::ssize(labels); }
};

/// The examples of a file, with the vocabulary that numbers their words.
struct TextDataset : Examples {
  std::shared_ptr<const TextVocabulary> vocabulary;  ///< the training file's
  uint64_t content_hash = 0;                         ///< of the (decompressed) file's bytes
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

}  // namespace distrain::data
