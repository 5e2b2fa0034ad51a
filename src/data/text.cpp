#include "distrain/data/text.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/base/text.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"

namespace distrain::data {

namespace {

// The separators of words within a line, as in fastText.
constexpr std::array<bool, 256> kSeparators = [] {
  std::array<bool, 256> table{};
  for (const unsigned char c : {' ', '\t', '\r', '\v', '\f', '\0'}) table[c] = true;
  return table;
}();

bool is_separator(char c) { return kSeparators[static_cast<unsigned char>(c)]; }

void for_each_token(std::string_view line, auto function) {
  const char* at = line.data();
  const char* const end = at + line.size();
  for (;;) {
    while (at < end && is_separator(*at)) ++at;
    if (at == end) return;
    const char* const begin = at;
    while (at < end && !is_separator(*at)) ++at;
    function(std::string_view(begin, static_cast<size_t>(at - begin)));
  }
}

/// Calls `function` with each line of `text`, without its \n and without a UTF-8 byte order mark at
/// the beginning. The last line needs no \n.
void for_each_line(std::string_view text, auto function) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    function(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

/// Reads a whole text. Throws `bad_data` if the file is compressed, UTF-16 or binary. As in git, a
/// zero byte among the first 8,000 bytes marks a binary file.
std::string read_text(const store::InputFile& file) {
  constexpr size_t kLooked = 8000;
  auto text = store::read_to_end<std::string>(file);
  const auto refuse = [&](const std::string& why) { base::bad_data(file.path() + ": " + why); };
  if (text.starts_with("\x1F\x8B")) refuse("compressed with gzip: unpack it first with gunzip");
  if (text.starts_with("\xFF\xFE") || text.starts_with("\xFE\xFF")) {
    refuse("UTF-16 text: convert it to UTF-8 first with iconv -f UTF-16 -t UTF-8");
  }
  const size_t zero = std::string_view(text).substr(0, kLooked).find('\0');
  if (zero != std::string_view::npos) {
    refuse("a binary file, not text: byte " + std::to_string(zero + 1) + " is zero");
  }
  return text;
}

constexpr std::string_view kLabelPrefix = "__label__";

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
  TextVocabulary own{{}, {}, hash_bits};         // filled from this text if `vocabulary` is null
  std::map<std::string, int64_t> label_numbers;  // of this text, by first appearance
  int64_t line_number = 0;
  const auto fail_at = [&](const char* what, std::string_view shown) {
    while (!shown.empty() && is_separator(shown.front())) shown.remove_prefix(1);
    while (!shown.empty() && is_separator(shown.back())) shown.remove_suffix(1);
    base::bad_data(name + ":" + std::to_string(line_number) + ": " + what + base::in_quotes(shown));
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
  const TextVocabulary& words = vocabulary ? *vocabulary : own;
  const auto number_of_word = [&](std::string_view token) {
    if (words.hash_bits > 0) {
      return static_cast<int64_t>(store::content_hash(token) >> (64 - words.hash_bits));
    }
    return vocabulary ? words.words.find(token) : own.words.add(token);
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
      const int64_t word = number_of_word(token);
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
  if (data.labels.empty()) base::bad_data(name + ": no example in this file");
  if (!vocabulary) {
    if (data.tokens.empty()) base::bad_data(name + ": no word in any example");
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
                           std::shared_ptr<const TextVocabulary> vocabulary, Labels labels,
                           int hash_bits) {
  return store::with_memory_for(path, [&] {
    return parse_fast_text(read_text(store::InputFile(path)), path, std::move(vocabulary), labels,
                           hash_bits);
  });
}

Vocabulary read_words(const std::string& path, int64_t max_words) {
  check(max_words == 0 || max_words >= kReservedWords,
        "a vocabulary has at least 2 words, <unk> and <eos>, or 0 for all, not ", max_words);
  return store::with_memory_for(path, [&] {
    // Refuses a pipe, because read_corpus() reads the same file again.
    const auto text = read_text(store::InputFile(path, store::InputFile::Kind::kRegular));
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
    const auto text = read_text(store::InputFile(path));
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
