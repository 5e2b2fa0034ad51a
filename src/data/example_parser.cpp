#include "example_parser.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "distrain/store/hash.h"
#include "lines.h"
#include "source_files.h"

namespace distrain::data {

namespace {

constexpr std::string_view kLabelPrefix = "__label__";
constexpr size_t kCriteoFields = 1 + kCriteoNumbers + kCriteoCategories;

// Returns where `part` begins in `line`.
size_t offset_in(std::string_view line, std::string_view part) {
  return static_cast<size_t>(part.data() - line.data());
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_separator(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_separator(text.back())) text.remove_suffix(1);
  return text;
}

// Sets `fields` to the parts of `line` between tabs, but to no more than one above kCriteoFields.
void split_criteo(std::string_view line, std::vector<std::string_view>& fields) {
  fields.clear();
  const char* at = line.data();
  const char* const end = at + line.size();
  while (fields.size() <= kCriteoFields) {
    const auto* const tab =
        static_cast<const char*>(std::memchr(at, '\t', static_cast<size_t>(end - at)));
    fields.emplace_back(at, static_cast<size_t>((tab ? tab : end) - at));
    if (!tab) return;
    at = tab + 1;
  }
}

std::string_view without_return(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

bool is_criteo_label(std::string_view field) { return field == "0" || field == "1"; }

}  // namespace

bool FastTextLine::split(std::string_view line, Labels labels) {
  label.reset();
  words.clear();
  for_each_token(line, [&](std::string_view token) {
    if (!token.starts_with(kLabelPrefix)) {
      words.push_back(token);
      return;
    }
    const auto refuse = [&](const char* reason) {
      throw BadRow{offset_in(line, token), reason + base::in_quotes(token)};
    };
    if (label) refuse("more than one label; the second is ");
    label = token.substr(kLabelPrefix.size());
    if (label->empty()) refuse("a label without a name: ");
  });
  if (label || labels == Labels::kSome) return label || !words.empty();
  if (words.empty()) return false;
  throw BadRow{offset_in(line, words.front()),
               "no __label__NAME in the line that begins with " + base::in_quotes(trimmed(line))};
}

int64_t number_of_word(std::string_view word, const TextVocabulary& vocabulary) {
  if (vocabulary.hash_bits == 0) return vocabulary.words.find(word);
  return static_cast<int64_t>(store::content_hash(word) >> (64 - vocabulary.hash_bits));
}

int64_t number_of_label(std::string_view label, std::string_view line,
                        const TextVocabulary& vocabulary) {
  const auto& known = vocabulary.labels;
  const auto found = std::lower_bound(known.begin(), known.end(), label);
  if (found != known.end() && *found == label) return found - known.begin();
  const size_t at = offset_in(line, label) - kLabelPrefix.size();
  throw BadRow{at, "a label that the training file does not have: " +
                       base::in_quotes(line.substr(at, kLabelPrefix.size() + label.size()))};
}

TextVocabulary VocabularyBuilder::finish(std::vector<int64_t>* classes) {
  if (classes) classes->resize(labels_.size());
  for (const auto& [label, number] : labels_) {
    if (classes) (*classes)[static_cast<size_t>(number)] = std::ssize(vocabulary_.labels);
    vocabulary_.labels.push_back(label);
  }
  return std::move(vocabulary_);
}

ExampleParser::ExampleParser(Format format, std::shared_ptr<const TextVocabulary> vocabulary)
    : format_(format), vocabulary_(std::move(vocabulary)) {
  for (int i = 1; i <= kCriteoNumbers; ++i) criteo_words_.push_back(fmt::format("I{}:", i));
  for (int i = 1; i <= kCriteoCategories; ++i) criteo_words_.push_back(fmt::format("C{}:", i));
}

bool ExampleParser::parse(std::string_view line, Examples& out) {
  return format_ == Format::kCriteo ? parse_criteo(without_return(line), out)
                                    : parse_fast_text(line, out);
}

bool ExampleParser::parse_fast_text(std::string_view line, Examples& out) {
  if (!parts_.split(line, Labels::kAll)) return false;
  const int64_t label = number_of_label(*parts_.label, line, *vocabulary_);
  append(out, parts_.words, label,
         [this](std::string_view word) { return number_of_word(word, *vocabulary_); });
  return true;
}

bool ExampleParser::parse_criteo(std::string_view line, Examples& out) {
  if (line.empty()) return false;
  split_criteo(line, fields_);
  if (fields_.size() != kCriteoFields) {
    constexpr const char* kParts = "an example has 40 (a label, 13 integers and 26 categories)";
    if (fields_.size() < kCriteoFields) {
      throw BadRow{line.size(), fmt::format("the line ends after {} field{}; {}", fields_.size(),
                                            fields_.size() == 1 ? "" : "s", kParts)};
    }
    throw BadRow{offset_in(line, fields_.back()), fmt::format("more than 40 fields; {}", kParts)};
  }
  if (!is_criteo_label(fields_[0])) {
    throw BadRow{0, "field 1 (the label) is " + base::in_quotes(fields_[0]) + ", not 0 or 1"};
  }
  std::array<std::optional<int64_t>, kCriteoNumbers> values;
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string_view field = fields_[1 + i];
    if (field.empty()) continue;
    values[i] = base::number<int64_t>(field);
    if (values[i]) continue;
    throw BadRow{offset_in(line, field),
                 fmt::format("field {} (number {}) is {}, not an integer of 64 bits", i + 2, i + 1,
                             base::in_quotes(field))};
  }
  for (size_t i = 0; i < values.size(); ++i) {
    double log = 0;
    word_ = criteo_words_[i];
    if (values[i] && *values[i] < 0) {
      word_.push_back('-');
    } else if (values[i]) {
      log = std::log1p(static_cast<double>(*values[i]));
      std::array<char, 24> digits;
      const auto bucket = static_cast<int64_t>(log * log);
      word_.append(digits.data(), std::to_chars(digits.begin(), digits.end(), bucket).ptr);
    }
    out.numbers.push_back(static_cast<float>(log));
    out.tokens.push_back(number_of_word(word_, *vocabulary_));
  }
  for (size_t i = values.size(); i < criteo_words_.size(); ++i) {
    word_ = criteo_words_[i];
    word_.append(fields_[1 + i]);
    out.tokens.push_back(number_of_word(word_, *vocabulary_));
  }
  out.labels.push_back(fields_[0] == "1" ? 1 : 0);
  out.offsets.push_back(std::ssize(out.tokens));
  return true;
}

Format detect_format(const std::string& path) {
  std::vector<SourceFile> files{find_source(path)};
  if (files[0].kind == SourceFile::Kind::kPipe) {
    base::bad_data(path +
                   ": the format of a pipe cannot be detected, because a pipe can be read "
                   "only once: give the format");
  }
  inspect(files);
  LineReader lines(files[0], 0, Piece::kToEnd, std::nullopt);
  std::vector<std::string_view> fields;
  while (const auto line = lines.next()) {
    const std::string_view text = trimmed(*line);
    if (text.empty()) continue;
    bool has_label = false;
    for_each_token(text, [&](std::string_view token) {
      has_label = has_label || token.starts_with(kLabelPrefix);
    });
    if (has_label) return Format::kFastText;
    split_criteo(without_return(*line), fields);
    if (fields.size() == kCriteoFields && is_criteo_label(fields[0])) return Format::kCriteo;
    base::bad_data(lines.place(0) +
                   ": neither fastText (a __label__NAME among the words) nor Criteo "
                   "(40 fields separated by tabs, the first of them 0 or 1): " +
                   base::in_quotes(text));
  }
  base::bad_data(path + ": no example in this file");
}

TextVocabulary scan_vocabulary(const std::vector<std::string>& paths, Format format, int hash_bits,
                               BadRows bad_rows, int64_t max_examples) {
  if (hash_bits < 0 || hash_bits > 62) {
    base::invalid(fmt::format("hash_bits must be in [0, 62], not {}", hash_bits));
  }
  if (format == Format::kCriteo) {
    if (hash_bits == 0) base::invalid("Criteo data needs hash_bits above 0");
    return {.labels = {"0", "1"}, .hash_bits = hash_bits};
  }
  std::vector<SourceFile> files = find_sources(paths);
  for (const SourceFile& file : files) {
    if (file.kind != SourceFile::Kind::kPipe) continue;
    base::bad_data(file.path +
                   ": a pipe can be read only once, so that its words and labels cannot be "
                   "collected before training: give a file");
  }
  inspect(files);
  VocabularyBuilder builder(hash_bits);
  FastTextLine parts;
  int64_t examples = 0;
  bool any_word = false;
  for (const SourceFile& file : files) {
    if (examples >= max_examples) break;
    LineReader lines(file, 0, Piece::kToEnd, std::nullopt);
    while (const auto line = examples < max_examples ? lines.next() : std::nullopt) {
      try {
        if (!parts.split(*line, Labels::kAll)) continue;
      } catch (const BadRow& row) {
        if (bad_rows == BadRows::kStop) base::bad_data(lines.place(row.at) + ": " + row.reason);
        continue;
      }
      ++examples;
      builder.add_label(*parts.label);
      any_word = any_word || !parts.words.empty();
      if (hash_bits > 0) continue;
      for (const std::string_view word : parts.words) builder.add_word(word);
    }
  }
  if (examples == 0) base::bad_data(names_of(files) + ": no example");
  if (!any_word) base::bad_data(names_of(files) + ": no word in any example");
  return builder.finish();
}

}  // namespace distrain::data
