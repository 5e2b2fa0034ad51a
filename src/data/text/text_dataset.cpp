#include "distrain/data/text_dataset.h"

#include <algorithm>
#include <map>
#include <utility>

#include "distrain/base/error.h"
#include "distrain/data/hash.h"
#include "files/file.h"
#include "text.h"

namespace distrain::data {
namespace {

using base::bad_data;

constexpr std::string_view kLabelPrefix = "__label__";

class Parser {
 public:
  Parser(std::string_view text, const std::string& name,
         std::shared_ptr<const TextVocabulary> vocabulary, Labels labels)
      : text_(text), name_(name), given_(std::move(vocabulary)), needed_(labels) {}

  TextDataset parse() {
    data_.offsets.push_back(0);
    data_.content_hash = content_hash(text_);
    for_each_line(text_, [this](std::string_view line) {
      ++line_;
      parse_line(line);
    });
    if (data_.labels.empty()) bad_data(name_ + ": no example in this file");
    if (given_) {
      data_.vocabulary = std::move(given_);
    } else {
      if (own_.words.size() == 0) bad_data(name_ + ": no word in any example");
      sort_labels();
      data_.vocabulary = std::make_shared<const TextVocabulary>(std::move(own_));
    }
    return std::move(data_);
  }

 private:
  void parse_line(std::string_view line) {
    int64_t label = Vocabulary::kUnknown;
    bool any = false;
    for_each_token(line, [&](std::string_view token) {
      any = true;
      if (token.starts_with(kLabelPrefix)) {
        if (label != Vocabulary::kUnknown) fail_at("more than one label; the second is ", token);
        label = label_of(token);
      } else {
        add_word(token);
      }
    });
    if (!any) return;
    if (label == Vocabulary::kUnknown && needed_ == Labels::kAll) {
      fail_at("no __label__NAME in the line that begins with ", line);
    }
    data_.labels.push_back(label);
    data_.offsets.push_back(static_cast<int64_t>(data_.tokens.size()));
  }

  int64_t label_of(std::string_view token) {
    const std::string_view name = token.substr(kLabelPrefix.size());
    if (name.empty()) fail_at("a label without a name: ", token);
    if (!given_) {
      const auto number = static_cast<int64_t>(label_numbers_.size());
      return label_numbers_.try_emplace(std::string(name), number).first->second;
    }
    const auto& known = given_->labels;
    const auto found = std::lower_bound(known.begin(), known.end(), name);
    if (found == known.end() || *found != name) {
      fail_at("a label that the training file does not have: ", token);
    }
    return found - known.begin();
  }

  void add_word(std::string_view token) {
    if (!given_) {
      data_.tokens.push_back(own_.words.add(token));
      return;
    }
    const int64_t id = given_->words.find(token);
    if (id == Vocabulary::kUnknown) {
      ++data_.dropped_tokens;
    } else {
      data_.tokens.push_back(id);
    }
  }

  // Classes are numbered by name, so that their numbers do not depend on the order of the lines.
  void sort_labels() {
    std::vector<int64_t> class_of(label_numbers_.size());
    for (const auto& [name, number] : label_numbers_) {
      class_of[static_cast<size_t>(number)] = std::ssize(own_.labels);
      own_.labels.push_back(name);
    }
    for (int64_t& label : data_.labels) label = class_of[static_cast<size_t>(label)];
  }

  [[noreturn]] void fail_at(std::string_view what, std::string_view text) const {
    while (!text.empty() && is_separator(text.front())) text.remove_prefix(1);
    while (!text.empty() && is_separator(text.back())) text.remove_suffix(1);
    bad_data(name_ + ":" + std::to_string(line_) + ": " + std::string(what) + in_quotes(text));
  }

  const std::string_view text_;
  const std::string& name_;
  std::shared_ptr<const TextVocabulary> given_;
  const Labels needed_;
  TextVocabulary own_;
  std::map<std::string, int64_t> label_numbers_;  // by first appearance
  TextDataset data_;
  int64_t line_ = 0;
};

}  // namespace

TextDataset parse_fast_text(std::string_view text, const std::string& name,
                            std::shared_ptr<const TextVocabulary> vocabulary, Labels labels) {
  return Parser(text, name, std::move(vocabulary), labels).parse();
}

TextDataset read_fast_text(const std::string& path,
                           std::shared_ptr<const TextVocabulary> vocabulary, Labels labels) {
  return with_memory_for(path, [&] {
    return parse_fast_text(read_text(InputFile(path)), path, std::move(vocabulary), labels);
  });
}

}  // namespace distrain::data
