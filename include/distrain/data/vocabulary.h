#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace distrain::data {

/// Strings numbered from 0 in the order in which they were first added.
class Vocabulary {
 public:
  static constexpr int64_t kUnknown = -1;

  Vocabulary() = default;
  /// These, as all_words() gives them.
  explicit Vocabulary(const std::vector<std::string>& words);

  /// The number of `word`, which is added if it is new.
  int64_t add(std::string_view word);

  /// The number of `word`, or kUnknown.
  int64_t find(std::string_view word) const;

  /// The word of this number; valid until the next add().
  std::string_view word(int64_t id) const;

  int64_t size() const { return static_cast<int64_t>(ends_.size()); }

 private:
  struct Slot {
    uint64_t hash = 0;
    int64_t id = kUnknown;  // then it is free
  };
  size_t slot_of(std::string_view word, uint64_t hash) const;
  void grow();

  // Open addressing with linear probing, at most half full; the size is a power of two.
  std::vector<Slot> slots_ = std::vector<Slot>(1024);
  std::string text_;          // all words, one after the other
  std::vector<size_t> ends_;  // of each word in text_
};

/// In the order of their numbers.
std::vector<std::string> all_words(const Vocabulary& vocabulary);

}  // namespace distrain::data
