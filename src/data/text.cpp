#include "distrain/data/text.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
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

/// Reads a whole text, which may be compressed with gzip. Throws `bad_data` if it is UTF-16 or
/// binary.
std::string read_text(const std::string& path,
                      store::InputFile::Kind kind = store::InputFile::Kind::kAny) {
  store::GzipReader file(store::InputFile(path, kind));
  auto text = store::read_to_end<std::string>(file);
  check_text(path, 0, text);
  return text;
}

constexpr std::string_view kReserved[] = {"<unk>", "<eos>"};  // kUnknownWord, kEndOfLine
constexpr const char* kNoWord = ": no word in this file";
constexpr int64_t kReservedWords = std::size(kReserved);

int64_t number_of(std::string_view word, const Vocabulary& vocabulary) {
  const int64_t id = vocabulary.find(word);
  return id == Vocabulary::kUnknown ? kUnknownWord : id;
}

void check(bool right, const char* what, int64_t value) {
  if (!right) base::invalid(what + std::to_string(value));
}

}  // namespace

Vocabulary::Vocabulary(const std::vector<std::string>& words) {
  for (const std::string& word : words) add(word);
}

int64_t Vocabulary::add(std::string_view word) {
  if (const int64_t id = find(word); id != kUnknown) return id;
  return ids_.emplace(words_.emplace_back(word), std::ssize(ids_)).first->second;
}

int64_t Vocabulary::find(std::string_view word) const {
  const auto it = ids_.find(word);
  return it == ids_.end() ? kUnknown : it->second;
}

TextDataset parse_fast_text(std::string_view text, const std::string& name,
                            std::shared_ptr<const TextVocabulary> vocabulary, Labels labels,
                            int hash_bits) {
  TextDataset data;
  VocabularyBuilder own(hash_bits);  // is filled from this text if `vocabulary` is null
  FastTextLine parts;
  int64_t line_number = 0;
  data.offsets.push_back(0);
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
    for (const std::string_view token : parts.words) {
      const int64_t word = vocabulary ? number_of_word(token, *vocabulary) : own.add_word(token);
      if (word == Vocabulary::kUnknown) {
        ++data.dropped_tokens;
      } else {
        data.tokens.push_back(word);
      }
    }
    data.labels.push_back(label);
    data.offsets.push_back(std::ssize(data.tokens));
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
    return parse_fast_text(read_text(path), path, std::move(vocabulary), labels, hash_bits);
  });
}

Vocabulary read_words(const std::string& path, int64_t max_words) {
  check(max_words == 0 || max_words >= kReservedWords,
        "a vocabulary has at least 2 words, <unk> and <eos>, or 0 for all, not ", max_words);
  return store::with_memory_for(path, [&] {
    // Refuses a pipe, because read_corpus() reads the same file again.
    const auto text = read_text(path, store::InputFile::Kind::kRegular);
    Vocabulary seen;  // by first appearance
    for (const std::string_view word : kReserved) seen.add(word);
    std::vector<int64_t> counts(kReservedWords, 0);
    bool any = false;
    for_each_line(text, [&](std::string_view line) {
      for_each_token(line, [&](std::string_view word) {
        any = true;
        const auto id = static_cast<size_t>(seen.add(word));
        if (id == counts.size()) counts.push_back(0);
        ++counts[id];
      });
    });
    if (!any) base::bad_data(path + kNoWord);

    std::vector<int64_t> order(counts.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin() + kReservedWords, order.end(), [&](int64_t a, int64_t b) {
      return counts[static_cast<size_t>(a)] > counts[static_cast<size_t>(b)];
    });
    if (max_words > 0 && max_words < seen.size()) order.resize(static_cast<size_t>(max_words));
    Vocabulary words;
    for (const int64_t id : order) words.add(seen.word(id));
    return words;
  });
}

Corpus read_corpus(const std::string& path, const Vocabulary& vocabulary) {
  return store::with_memory_for(path, [&] {
    const auto text = read_text(path);
    Corpus corpus;
    corpus.content_hash = store::content_hash(text);
    for_each_line(text, [&](std::string_view line) {
      const size_t before = corpus.tokens.size();
      for_each_token(line, [&](std::string_view word) {
        corpus.tokens.push_back(number_of(word, vocabulary));
      });
      if (corpus.tokens.size() > before) corpus.tokens.push_back(kEndOfLine);
    });
    if (corpus.tokens.empty()) base::bad_data(path + kNoWord);
    return corpus;
  });
}

Corpus random_corpus(uint64_t seed, int64_t words, int64_t count) {
  base::Random random({seed});
  Corpus corpus;
  corpus.tokens.resize(static_cast<size_t>(count));
  for (int64_t& token : corpus.tokens) token = random.between(0, words - 1);
  return corpus;
}

std::vector<std::vector<int64_t>> Corpus::lines() const {
  std::vector<std::vector<int64_t>> lines(1);
  for (const int64_t word : tokens) {
    if (word == kEndOfLine) {
      lines.emplace_back();
    } else {
      lines.back().push_back(word);
    }
  }
  lines.pop_back();  // the words after the last `<eos>`
  return lines;
}

std::vector<int64_t> to_tokens(std::string_view text, const Vocabulary& vocabulary) {
  std::vector<int64_t> tokens;
  for_each_line(text, [&](std::string_view line) {
    for_each_token(line,
                   [&](std::string_view word) { tokens.push_back(number_of(word, vocabulary)); });
  });
  return tokens;
}

TokenColumns::TokenColumns(const std::vector<int64_t>& tokens, int64_t columns, int64_t first,
                           int64_t count)
    : tokens_(tokens), column_length_(0), first_(first), count_(count) {
  check(columns >= 1, "the number of columns must be at least 1, not ", columns);
  check(first >= 0 && first < columns, "there is no column ", first);
  check(count >= 1 && count <= columns - first,
        "the columns read must be at least one, and not more than there are, not ", count);
  const auto size = static_cast<int64_t>(tokens.size());
  column_length_ = size / columns;
  if (column_length_ < 2) {
    base::bad_data(std::to_string(size) + " tokens are too few for " + std::to_string(columns) +
                   " columns of at least two tokens: a smaller --batch-size makes fewer columns");
  }
}

int64_t TokenColumns::steps(int64_t length) const {
  check(length >= 1, "the length of a batch must be at least 1, not ", length);
  return (column_length_ - 2) / length + 1;  // the last token of a column is a target only
}

TokenColumns::Batch TokenColumns::batch(int64_t step, int64_t length) const {
  check(step >= 0 && step < steps(length), "these columns have no step ", step);
  const int64_t begin = step * length;
  const int64_t rows = std::min(length, column_length_ - 1 - begin);
  auto* const tokens = const_cast<int64_t*>(tokens_.data()) + first_ * column_length_;
  const at::Tensor columns = at::from_blob(tokens, {count_, column_length_}, at::kLong).t();
  const auto from = [&](int64_t row) {
    return columns.narrow(0, row, rows).clone(at::MemoryFormat::Contiguous);
  };
  return {from(begin), from(begin + 1).flatten()};
}

}  // namespace distrain::data
