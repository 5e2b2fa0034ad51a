#include "distrain/data/text_dataset.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/data/hash.h"

namespace distrain::data {
namespace {

using base::ErrorKind;
using base::Exception;

constexpr std::string_view kLabelPrefix = "__label__";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr size_t kShown = 40;  // bytes of the user's text in a message

constexpr std::array<bool, 256> kSeparators = [] {
  std::array<bool, 256> table{};
  for (const unsigned char c : {' ', '\t', '\r', '\v', '\f', '\0'}) table[c] = true;
  return table;
}();

bool is_separator(char c) { return kSeparators[static_cast<unsigned char>(c)]; }

// `text` for a message: quoted, one line, not too long.
std::string quoted(std::string_view text) {
  std::string shown = "'";
  for (const char c : text.substr(0, kShown)) {
    const bool plain = static_cast<unsigned char>(c) >= 0x20 && c != 0x7F;
    shown += plain ? c : '?';
  }
  // A message is UTF-8: a character that the limit cut in two goes.
  if (text.size() > kShown) {
    while (shown.size() > 1 && (shown.back() & 0xC0) == 0x80) shown.pop_back();
    if (shown.size() > 1 && (shown.back() & 0x80) != 0) shown.pop_back();
    shown += "…";
  }
  return shown + "'";
}

std::string errno_text() {
  std::array<char, 128> buffer{};
  return strerror_r(errno, buffer.data(), buffer.size());
}

class File {
 public:
  explicit File(const std::string& path)
      : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) fail("cannot open " + path_ + ": " + errno_text());
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Reads to the end rather than by size: the path may be a pipe.
  std::string read_all() {
    struct stat status {};
    std::string bytes;
    if (fstat(fd_, &status) == 0 && S_ISREG(status.st_mode)) {
      bytes.resize(static_cast<size_t>(status.st_size) + 1);  // one more, to see the end at once
    }
    size_t used = 0;
    for (;;) {
      if (used == bytes.size()) bytes.resize(std::max<size_t>(size_t{64} << 10, 2 * used));
      const ssize_t got = read(fd_, bytes.data() + used, bytes.size() - used);
      if (got == 0) break;
      if (got > 0) {
        used += static_cast<size_t>(got);
      } else if (errno != EINTR) {
        fail("cannot read " + path_ + ": " + errno_text());
      }
    }
    bytes.resize(used);
    return bytes;
  }

 private:
  [[noreturn]] static void fail(std::string message) {
    throw Exception(ErrorKind::kBadData, std::move(message));
  }

  const std::string& path_;
  int fd_;
};

class Parser {
 public:
  Parser(std::string_view text, const std::string& name,
         std::shared_ptr<const TextVocabulary> vocabulary)
      : text_(text), name_(name), given_(std::move(vocabulary)) {}

  TextDataset parse() {
    data_.offsets.push_back(0);
    data_.content_hash = content_hash(text_);
    std::string_view rest = text_;
    if (rest.starts_with(kByteOrderMark)) rest.remove_prefix(kByteOrderMark.size());
    while (!rest.empty()) {
      ++line_;
      const size_t end = std::min(rest.find('\n'), rest.size());
      parse_line(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    if (data_.labels.empty()) fail(name_ + ": no example in this file");
    if (given_) {
      data_.vocabulary = std::move(given_);
    } else {
      if (own_.words.size() == 0) fail(name_ + ": no word in any example");
      sort_labels();
      data_.vocabulary = std::make_shared<const TextVocabulary>(std::move(own_));
    }
    return std::move(data_);
  }

 private:
  void parse_line(std::string_view line) {
    const size_t first = data_.tokens.size();
    int64_t label = Vocabulary::kUnknown;
    bool any = false;
    const char* at = line.data();
    const char* const end = at + line.size();
    for (;;) {
      while (at < end && is_separator(*at)) ++at;
      if (at == end) break;
      const char* begin = at;
      while (at < end && !is_separator(*at)) ++at;
      const std::string_view token(begin, static_cast<size_t>(at - begin));
      any = true;
      if (token.starts_with(kLabelPrefix)) {
        if (label != Vocabulary::kUnknown) fail_at("more than one label; the second is ", token);
        label = label_of(token);
      } else {
        add_word(token);
      }
    }
    if (!any) return;
    if (label == Vocabulary::kUnknown) {
      data_.tokens.resize(first);
      fail_at("no __label__NAME in the line that begins with ", line);
    }
    data_.labels.push_back(label);
    data_.offsets.push_back(static_cast<int64_t>(data_.tokens.size()));
  }

  int64_t label_of(std::string_view token) {
    const std::string_view name = token.substr(kLabelPrefix.size());
    if (name.empty()) fail_at("a label without a name: ", token);
    if (!given_) return label_ids_.add(name);
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
    std::vector<int64_t> order(static_cast<size_t>(label_ids_.size()));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [this](int64_t a, int64_t b) { return label_ids_.word(a) < label_ids_.word(b); });
    std::vector<int64_t> class_of(order.size());
    for (size_t i = 0; i < order.size(); ++i) {
      class_of[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
      own_.labels.emplace_back(label_ids_.word(order[i]));
    }
    for (int64_t& label : data_.labels) label = class_of[static_cast<size_t>(label)];
  }

  [[noreturn]] void fail_at(std::string_view what, std::string_view text) const {
    while (!text.empty() && is_separator(text.front())) text.remove_prefix(1);
    while (!text.empty() && is_separator(text.back())) text.remove_suffix(1);
    fail(name_ + ":" + std::to_string(line_) + ": " + std::string(what) + quoted(text));
  }

  [[noreturn]] static void fail(std::string message) {
    throw Exception(ErrorKind::kBadData, std::move(message));
  }

  const std::string_view text_;
  const std::string& name_;
  std::shared_ptr<const TextVocabulary> given_;
  TextVocabulary own_;
  Vocabulary label_ids_;  // by first appearance
  TextDataset data_;
  int64_t line_ = 0;
};

}  // namespace

TextDataset parse_fast_text(std::string_view text, const std::string& name,
                            std::shared_ptr<const TextVocabulary> vocabulary) {
  return Parser(text, name, std::move(vocabulary)).parse();
}

TextDataset read_fast_text(const std::string& path) { return read_fast_text(path, nullptr); }

TextDataset read_fast_text(const std::string& path,
                           std::shared_ptr<const TextVocabulary> vocabulary) {
  try {
    return parse_fast_text(File(path).read_all(), path, std::move(vocabulary));
  } catch (const std::length_error&) {
    throw Exception(ErrorKind::kResources, path + " is too large");
  } catch (const std::bad_alloc&) {
    throw Exception(ErrorKind::kResources, "no memory for " + path);
  }
}

}  // namespace distrain::data
