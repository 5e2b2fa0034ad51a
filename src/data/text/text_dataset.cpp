#include "distrain/data/text_dataset.h"

#include <algorithm>
#include <map>
#include <utility>

#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "distrain/store/file.h"
#include "text.h"

namespace distrain::data {
namespace {

using base::bad_data;

constexpr std::string_view kLabelPrefix = "__label__";

}  // namespace

TextDataset parse_fast_text(std::string_view text, const std::string& name,
                            std::shared_ptr<const TextVocabulary> vocabulary, Labels labels) {
  TextDataset data;
  TextVocabulary own;                            // of this text, unless there is a vocabulary
  std::map<std::string, int64_t> label_numbers;  // of this text, by first appearance
  int64_t line_number = 0;
  const auto fail_at = [&](const char* what, std::string_view shown) {
    while (!shown.empty() && is_separator(shown.front())) shown.remove_prefix(1);
    while (!shown.empty() && is_separator(shown.back())) shown.remove_suffix(1);
    bad_data(name + ":" + std::to_string(line_number) + ": " + what + base::in_quotes(shown));
  };
  const auto number_of_label = [&](std::string_view token) {
    const std::string_view label = token.substr(kLabelPrefix.size());
    if (label.empty()) fail_at("a label without a name: ", token);
    if (!vocabulary) {
      const auto number = static_cast<int64_t>(label_numbers.size());
      return label_numbers.try_emplace(std::string(label), number).first->second;
    }
    const auto& known = vocabulary->labels;
    const auto found = std::lower_bound(known.begin(), known.end(), label);
    if (found == known.end() || *found != label) {
      fail_at("a label that the training file does not have: ", token);
    }
    return found - known.begin();
  };
  data.offsets.push_back(0);
  data.content_hash = store::content_hash(text);
  for_each_line(text, [&](std::string_view line) {
    ++line_number;
    int64_t label = Vocabulary::kUnknown;
    bool any = false;
    for_each_token(line, [&](std::string_view token) {
      any = true;
      if (token.starts_with(kLabelPrefix)) {
        if (label != Vocabulary::kUnknown) fail_at("more than one label; the second is ", token);
        label = number_of_label(token);
        return;
      }
      const int64_t word = vocabulary ? vocabulary->words.find(token) : own.words.add(token);
      if (word == Vocabulary::kUnknown) {
        ++data.dropped_tokens;
      } else {
        data.tokens.push_back(word);
      }
    });
    if (!any) return;
    if (label == Vocabulary::kUnknown && labels == Labels::kAll) {
      fail_at("no __label__NAME in the line that begins with ", line);
    }
    data.labels.push_back(label);
    data.offsets.push_back(std::ssize(data.tokens));
  });
  if (data.labels.empty()) bad_data(name + ": no example in this file");
  if (!vocabulary) {
    if (own.words.size() == 0) bad_data(name + ": no word in any example");
    // Classes are numbered by name, so that their numbers do not depend on the order of the lines.
    std::vector<int64_t> class_of(label_numbers.size());
    for (const auto& [label, number] : label_numbers) {
      class_of[static_cast<size_t>(number)] = std::ssize(own.labels);
      own.labels.push_back(label);
    }
    for (int64_t& label : data.labels) label = class_of[static_cast<size_t>(label)];
    vocabulary = std::make_shared<const TextVocabulary>(std::move(own));
  }
  data.vocabulary = std::move(vocabulary);
  return data;
}

TextDataset read_fast_text(const std::string& path,
                           std::shared_ptr<const TextVocabulary> vocabulary, Labels labels) {
  return store::with_memory_for(path, [&] {
    return parse_fast_text(read_text(store::InputFile(path)), path, std::move(vocabulary), labels);
  });
}

}  // namespace distrain::data
