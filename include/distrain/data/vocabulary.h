#pragma once

#include <cstddef>
#include <cstdint>
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
  explicit Vocabulary(const std::vector<std::string>& words);

  /// Returns the number of `word`. Adds `word` if it is new.
  int64_t add(std::string_view word);

  /// Returns the number of `word`, or kUnknown.
  int64_t find(std::string_view word) const;

  /// Returns the word with this number; valid until the next add().
  std::string_view word(int64_t id) const;

  int64_t size() const { return static_cast<int64_t>(ends_.size()); }

 private:
  struct Slot {
    uint64_t hash = 0;
    int64_t id = kUnknown;  // kUnknown if the slot is free
  };
  size_t slot_of(std::string_view word, uint64_t hash) const;
  void grow();

  // Open addressing with linear probing, at most half full; the size is a power of two.
  std::vector<Slot> slots_ = std::vector<Slot>(1024);
  std::string text_;          // all words, concatenated
  std::vector<size_t> ends_;  // end of each word in text_
};

/// Returns all words in the order of their numbers.
std::vector<std::string> all_words(const Vocabulary& vocabulary);

}  // namespace distrain::data
