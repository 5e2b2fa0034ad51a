#include "distrain/data/text.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "distrain/base/error.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"
#include "example_parser.h"
#include "lines.h"
#include "source_files.h"

namespace distrain::data {

namespace {

/// Calls `function` with each line of `text`, without its \n and without a UTF-8 byte order mark at
/// the beginning. The last line needs no \n.
void for_each_line(std::string_view text, auto function) {
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    function(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

}  // namespace

int64_t Vocabulary::add(std::string_view word) {
  if ((words_.size() + 1) * 4 > slots_.size() * 3) grow();
  Slot slot = slot_with(word);
  Slot& found = slots_[slot_of(slot, word)];
  if (found.position == 0) {
    words_.emplace_back(word);
    slot.position = static_cast<uint32_t>(words_.size());
    found = slot;
  }
  return int64_t{found.position} - 1;
}

// Returns an entry of `word` without a number.
Vocabulary::Slot Vocabulary::slot_with(std::string_view word) {
  const auto size = static_cast<uint32_t>(std::min<size_t>(word.size(), UINT32_MAX));
  const char* const bytes = word.data();
  const auto load = [](const char* from, auto number) -> uint64_t {
    std::memcpy(&number, from, sizeof number);
    return number;
  };
  // Together with the size, these loads tell all words of at most 8 bytes apart.
  if (size > 8) return {store::content_hash(word), size};
  if (size >= 4) return {load(bytes, uint32_t{}) << 32 | load(bytes + size - 4, uint32_t{}), size};
  if (size >= 2) return {load(bytes, uint16_t{}) << 16 | load(bytes + size - 2, uint16_t{}), size};
  return {size == 0 ? 0 : load(bytes, uint8_t{}), size};
}

// Returns the index of the entry of `word`, or of the free slot where it belongs.
size_t Vocabulary::slot_of(const Slot& wanted, std::string_view word) const {
  const size_t last = slots_.size() - 1;
  // Fibonacci hashing: only the highest bits of the product depend on all bits of the key.
  size_t at = ((wanted.key + wanted.size) * 0x9E3779B97F4A7C15) >> std::countl_zero(last);
  for (;; at = (at + 1) & last) {
    const Slot& slot = slots_[at];
    if (slot.position == 0) return at;
    if (slot.key != wanted.key || slot.size != wanted.size) continue;
    if (slot.size <= 8 || words_[slot.position - 1] == word) return at;
  }
}

void Vocabulary::grow() {
  if (words_.size() > UINT32_MAX / 2) {
    throw base::Exception(base::ErrorKind::kResources, "a vocabulary has at most 2^31 words");
  }
  std::vector<Slot> larger(std::max<size_t>(2 * slots_.size(), 16));
  for (const Slot& slot : std::exchange(slots_, std::move(larger))) {
    if (slot.position > 0) slots_[slot_of(slot, words_[slot.position - 1])] = slot;
  }
}

TextDataset parse_fast_text(std::string_view text, const std::string& name,
                            std::shared_ptr<const TextVocabulary> vocabulary, Labels labels,
                            int hash_bits) {
  TextDataset data;
  VocabularyBuilder own(hash_bits);  // is filled from this text if `vocabulary` is null
  FastTextLine parts;
  int64_t line_number = 0;
  data.content_hash = store::content_hash(text);
  for_each_line(text, [&](std::string_view line) {
    ++line_number;
    int64_t label = Vocabulary::kUnknown;
    try {
      if (!parts.split(line, labels)) return;
      if (parts.label) {
        label = vocabulary ? number_of_label(*parts.label, line, *vocabulary)
                           : own.add_label(*parts.label);
      }
    } catch (const BadRow& row) {
      base::bad_data(name + ":" + std::to_string(line_number) + ": " + row.reason);
    }
    append(data, parts.words, label, [&](std::string_view word) {
      return vocabulary ? number_of_word(word, *vocabulary) : own.add_word(word);
    });
  });
  if (data.labels.empty()) base::bad_data(name + ": no example in this file");
  if (!vocabulary) {
    if (data.tokens.empty()) base::bad_data(name + ": no word in any example");
    std::vector<int64_t> classes;
    vocabulary = std::make_shared<const TextVocabulary>(own.finish(&classes));
    for (int64_t& label : data.labels) {
      if (label >= 0) label = classes[static_cast<size_t>(label)];
    }
  }
  data.vocabulary = std::move(vocabulary);
  return data;
}

TextDataset read_fast_text(const std::string& path,
                           std::shared_ptr<const TextVocabulary> vocabulary, Labels labels,
                           int hash_bits) {
  return store::with_memory_for(path, [&] {
    store::GzipReader file{store::InputFile(path)};
    const auto text = store::read_to_end<std::string>(file);
    check_text(path, 0, text);
    return parse_fast_text(text, path, std::move(vocabulary), labels, hash_bits);
  });
}

}  // namespace distrain::data
