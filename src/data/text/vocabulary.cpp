#include "distrain/data/vocabulary.h"

#include <functional>

namespace distrain::data {

size_t Vocabulary::slot_of(std::string_view word, uint64_t hash) const {
  const size_t mask = slots_.size() - 1;
  size_t at = hash & mask;
  while (slots_[at].id != kUnknown &&
         (slots_[at].hash != hash || this->word(slots_[at].id) != word)) {
    at = (at + 1) & mask;
  }
  return at;
}

int64_t Vocabulary::add(std::string_view word) {
  const uint64_t hash = std::hash<std::string_view>{}(word);
  size_t at = slot_of(word, hash);
  if (slots_[at].id != kUnknown) return slots_[at].id;
  if (2 * (ends_.size() + 1) > slots_.size()) {
    grow();
    at = slot_of(word, hash);
  }
  const int64_t id = size();
  slots_[at] = Slot{hash, id};
  text_.append(word);
  ends_.push_back(text_.size());
  return id;
}

int64_t Vocabulary::find(std::string_view word) const {
  return slots_[slot_of(word, std::hash<std::string_view>{}(word))].id;
}

std::string_view Vocabulary::word(int64_t id) const {
  const auto i = static_cast<size_t>(id);
  const size_t begin = i == 0 ? 0 : ends_[i - 1];
  return std::string_view(text_).substr(begin, ends_[i] - begin);
}

Vocabulary::Vocabulary(const std::vector<std::string>& words) {
  for (const std::string& word : words) add(word);
}

std::vector<std::string> all_words(const Vocabulary& vocabulary) {
  std::vector<std::string> words;
  for (int64_t id = 0; id < vocabulary.size(); ++id) words.emplace_back(vocabulary.word(id));
  return words;
}

void Vocabulary::grow() {
  std::vector<Slot> old(2 * slots_.size());
  old.swap(slots_);
  for (const Slot& slot : old) {
    if (slot.id != kUnknown) slots_[slot_of(word(slot.id), slot.hash)] = slot;
  }
}

}  // namespace distrain::data
