#include "distrain/data/tokens.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/base/text.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"
#include "example_parser.h"
#include "lines.h"
#include "source_files.h"

namespace distrain::data {

namespace {

using Kind = store::InputFile::Kind;

constexpr std::string_view kReserved[] = {"<unk>", "<eos>"};  // kUnknownWord, kEndOfLine
constexpr int64_t kReservedWords = std::size(kReserved);
constexpr size_t kPiece = size_t{256} << 10;    // bytes that a pass reads at once
constexpr size_t kTextBytes = size_t{8} << 10;  // bytes that Tokens::read() of a text reads at once
constexpr size_t kHeadBytes = size_t{64} << 10;  // see TokenIndex::head_hash
constexpr size_t kLongestWord = size_t{1} << 20;

void check(bool right, const char* what, int64_t value) {
  if (!right) base::invalid(what + std::to_string(value));
}

/// Reads bytes, fewer than `bytes` at the end only, and returns their number.
using Read = std::function<size_t(uint8_t* out, size_t bytes)>;

/// Splits the bytes of a text into words and ends of lines.
class Tokenizer {
 public:
  /// Starts at byte `offset` of a text: at 0 or where a token begins.
  Tokenizer(const std::string& path, uint64_t offset, size_t buffer_bytes, Read read)
      : path_(path), read_(std::move(read)), buffer_(buffer_bytes), offset_(offset) {
    if (offset > 0) return;
    in_line_ = false;
    fill();
    if (rest().starts_with(kByteOrderMark)) at_ = kByteOrderMark.size();
  }

  /// Returns the next word, or an empty view for the end of a line that has words, or nothing at
  /// the end of the text. The view is valid until the next call.
  std::optional<std::string_view> next() {
    for (;; ++at_) {
      begin_ = at_;
      if (at_ == end_ && !fill()) {
        return std::exchange(in_line_, false) ? std::optional(std::string_view()) : std::nullopt;
      }
      if (is_separator(buffer_[at_])) continue;
      if (buffer_[at_] != '\n') return word();
      if (!std::exchange(in_line_, false)) continue;
      ++at_;
      return std::string_view();
    }
  }

  /// Returns the byte of the text at which the last token begins.
  uint64_t offset() const { return offset_ + begin_; }

 private:
  std::string_view rest() const { return {buffer_.data() + at_, end_ - at_}; }

  std::string_view word() {
    do {
      while (at_ < end_ && !is_separator(buffer_[at_]) && buffer_[at_] != '\n') ++at_;
    } while (at_ == end_ && fill());
    in_line_ = true;
    return {buffer_.data() + begin_, at_ - begin_};
  }

  /// Reads more bytes and drops those before the current token. Returns false at the end.
  bool fill() {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    offset_ += begin_;
    at_ -= begin_;
    end_ -= std::exchange(begin_, 0);
    if (end_ == buffer_.size()) {
      if (end_ >= kLongestWord) {
        base::bad_data(path_ + ": a word of 1 MiB or more begins at byte " +
                       std::to_string(offset_ + 1));
      }
      buffer_.resize(2 * end_);
    }
    const size_t got =
        read_(reinterpret_cast<uint8_t*>(buffer_.data()) + end_, buffer_.size() - end_);
    end_ += got;
    return got > 0;
  }

  const std::string path_;
  const Read read_;
  std::vector<char> buffer_;
  uint64_t offset_;                      // of buffer_[0] in the text
  size_t begin_ = 0, at_ = 0, end_ = 0;  // the current token is buffer_[begin_, at_)
  bool in_line_ = true;                  // the current line has a word
};

/// Reads a text, which may be compressed, in pieces.
TokenIndex scan(const std::string& path, Kind kind, uint64_t max_unpacked, const auto& on_word) {
  store::GzipReader reader(store::InputFile(path, kind));
  if (reader.gzip()) reader.limit({max_unpacked, "of --in-memory: unpack it with gunzip"});
  TokenIndex index;
  store::ContentHasher hasher;
  std::vector<int64_t> offsets;
  Tokenizer tokenizer(path, 0, kPiece, [&](uint8_t* out, size_t bytes) {
    const size_t got = reader.read(out, bytes);
    check_text(path, index.bytes, {reinterpret_cast<const char*>(out), got});
    hasher.add({out, got});
    index.bytes += got;
    return got;
  });
  for (; const auto word = tokenizer.next(); ++index.tokens) {
    if (index.tokens % TokenIndex::kInterval == 0) {
      offsets.push_back(static_cast<int64_t>(tokenizer.offset()));
    }
    on_word(*word);
  }
  if (index.tokens == 0) base::bad_data(path + ": no word in this file");
  index.content_hash = hasher.value();
  index.offsets = at::tensor(offsets, at::kLong);
  return index;
}

uint64_t head_hash(const store::InputFile& file) {
  std::vector<uint8_t> head(std::min<uint64_t>(file.size(), kHeadBytes));
  file.read_at(0, head);
  return store::content_hash({reinterpret_cast<const char*>(head.data()), head.size()});
}

/// Returns the token that load_text() adds to each line.
int64_t end_of_line(const Vocabulary& vocabulary) {
  return has_reserved_words(vocabulary) ? kEndOfLine : Vocabulary::kUnknown;
}

int64_t number_of(std::string_view word, const Vocabulary& vocabulary) {
  if (word.empty()) return end_of_line(vocabulary);
  const int64_t id = vocabulary.find(word);
  if (id != Vocabulary::kUnknown) return id;
  if (has_reserved_words(vocabulary)) return kUnknownWord;
  base::bad_data(base::in_quotes(word) + " is not the number of a token below " +
                 std::to_string(vocabulary.size()));
}

class TokensInMemory : public Tokens {
 public:
  TokensInMemory(std::vector<int32_t> tokens, uint64_t content_hash)
      : Tokens(std::ssize(tokens), content_hash), tokens_(std::move(tokens)) {}

  void read(int64_t first, std::span<int64_t> out) const override {
    std::copy_n(tokens_.begin() + first, out.size(), out.begin());
  }

 private:
  const std::vector<int32_t> tokens_;
};

/// Converts `bytes`, tokens of a `.bin` file from `first` on.
void decode(const std::string& path, std::span<const uint8_t> bytes, int64_t words, int64_t first,
            std::span<int64_t> out) {
  const size_t width = bytes.size() / out.size();
  for (size_t i = 0; i < out.size(); ++i) {
    uint32_t token = 0;
    if (width == 2) {  // sizes that the compiler knows
      std::memcpy(&token, bytes.data() + 2 * i, 2);
    } else {
      std::memcpy(&token, bytes.data() + 4 * i, 4);
    }
    out[i] = token;
    if (out[i] < words) continue;
    base::bad_data(path + ": token " + std::to_string(first + static_cast<int64_t>(i)) + " is " +
                   std::to_string(token) + ", but the vocabulary has the numbers from 0 to " +
                   std::to_string(words - 1));
  }
}

class TokensOfFile : public Tokens {
 public:
  TokensOfFile(const std::string& path, const Vocabulary& vocabulary, TokenIndex index)
      : Tokens(index.tokens, index.content_hash),
        file_(path, Kind::kRegular),
        vocabulary_(vocabulary),
        index_(std::move(index)) {
    if (file_.size() == index_.bytes && head_hash(file_) == index_.head_hash) return;
    base::bad_data(path +
                   ": its size or its first 64 KiB are not those of the file that was indexed; it "
                   "has changed, or the first trainer has another file");
  }

  void read(int64_t first, std::span<int64_t> out) const override {
    if (out.empty()) return;
    if (index_.width == 0) return read_text(first, out);
    std::vector<uint8_t> bytes(out.size() * static_cast<size_t>(index_.width));
    file_.read_at(static_cast<uint64_t>(first * index_.width), bytes);
    decode(file_.path(), bytes, vocabulary_.size(), first, out);
  }

 private:
  // Splits on average kInterval / 2 tokens before `first`, which costs about 10 µs: less than it
  // would be worth to keep a position for each column.
  void read_text(int64_t first, std::span<int64_t> out) const {
    auto at = static_cast<uint64_t>(
        index_.offsets.const_data_ptr<int64_t>()[first / TokenIndex::kInterval]);
    Tokenizer tokenizer(file_.path(), at, kTextBytes, [&](uint8_t* bytes, size_t count) {
      count = std::min<uint64_t>(count, index_.bytes - at);
      file_.read_at(at, {bytes, count});
      at += count;
      return count;
    });
    const auto next = [&] {
      if (const auto word = tokenizer.next()) return *word;
      base::bad_data(file_.path() + ": changed while it is read");
    };
    for (int64_t skip = first % TokenIndex::kInterval; skip > 0; --skip) next();
    for (int64_t& token : out) token = number_of(next(), vocabulary_);
  }

  const store::InputFile file_;
  const Vocabulary& vocabulary_;
  const TokenIndex index_;
};

}  // namespace

void for_each_line(const Tokens& tokens, const Vocabulary& vocabulary,
                   const std::function<void(const std::vector<int64_t>& line)>& function) {
  const int64_t end = end_of_line(vocabulary);
  std::vector<int64_t> line, piece;
  for (int64_t first = 0; first < tokens.size(); first += std::ssize(piece)) {
    piece.resize(static_cast<size_t>(std::min<int64_t>(tokens.size() - first, 65536)));
    tokens.read(first, piece);
    for (const int64_t word : piece) {
      if (word != end) {
        line.push_back(word);
      } else {
        function(std::exchange(line, {}));
      }
    }
  }
}

TokensPtr make_tokens(std::vector<int32_t> tokens, uint64_t content_hash) {
  return std::make_shared<TokensInMemory>(std::move(tokens), content_hash);
}

TokensPtr random_tokens(uint64_t seed, int64_t words, int64_t count) {
  base::Random random({seed});
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.between(0, words - 1));
  return make_tokens(std::move(tokens));
}

TokenIndex index_text(const std::string& path, const OnWord& on_word, uint64_t max_unpacked) {
  TokenIndex index = scan(path, Kind::kRegular, max_unpacked, [&](std::string_view word) {
    if (on_word) on_word(word);
  });
  index.head_hash = head_hash(store::InputFile(path, Kind::kRegular));
  return index;
}

TokenIndex index_bin(const std::string& path, int width, int64_t words) {
  const store::InputFile file(path, Kind::kRegular);
  TokenIndex index{.width = width, .bytes = file.size(), .head_hash = head_hash(file)};
  if (index.bytes == 0) base::bad_data(path + ": the file is empty");
  if (index.bytes % static_cast<uint64_t>(width) != 0) {
    base::bad_data(path + ": " + std::to_string(index.bytes) +
                   " bytes are not a whole number of tokens of " + std::to_string(width) +
                   " bytes");
  }
  index.tokens = static_cast<int64_t>(index.bytes) / width;
  store::ContentHasher hasher;
  std::vector<uint8_t> bytes(kPiece);
  std::vector<int64_t> tokens;
  for (uint64_t at = 0; at < index.bytes; at += bytes.size()) {
    bytes.resize(std::min<uint64_t>(kPiece, index.bytes - at));
    file.read_at(at, bytes);
    hasher.add(bytes);
    tokens.resize(bytes.size() / static_cast<size_t>(width));
    decode(path, bytes, words, static_cast<int64_t>(at) / width, tokens);
  }
  index.content_hash = hasher.value();
  return index;
}

TokensPtr open_tokens(const std::string& path, const Vocabulary& vocabulary, TokenIndex index) {
  return std::make_shared<TokensOfFile>(path, vocabulary, std::move(index));
}

TokensPtr load_text(const std::string& path, const Vocabulary& vocabulary, uint64_t max_unpacked) {
  return store::with_memory_for(path, [&] {
    std::vector<int32_t> tokens;
    const TokenIndex index = scan(path, Kind::kAny, max_unpacked, [&](std::string_view word) {
      tokens.push_back(static_cast<int32_t>(number_of(word, vocabulary)));
    });
    return make_tokens(std::move(tokens), index.content_hash);
  });
}

WordCounts::WordCounts(int64_t max_words, int64_t max_counted)
    : max_words_(max_words), max_counted_(std::max(max_counted, 2 * max_words)) {
  check(max_words == 0 || max_words >= kReservedWords,
        "a vocabulary has at least 2 words, <unk> and <eos>, or 0 for all, not ", max_words);
  for (const std::string_view word : kReserved) seen_.add(word);
  counts_.resize(kReservedWords);
}

void WordCounts::add(std::string_view word) {
  if (word.empty()) return;
  const auto id = static_cast<size_t>(seen_.add(word));
  if (id == counts_.size()) counts_.push_back(0);
  ++counts_[id];
  if (max_words_ == 0 || seen_.size() <= max_counted_) return;
  std::vector<int64_t> kept = by_count(max_counted_ / 2);
  std::ranges::sort(kept);  // keeps the order of first appearance
  Vocabulary seen;
  for (int64_t& value : kept) {
    seen.add(seen_.word(value));
    value = counts_[static_cast<size_t>(value)];
  }
  seen_ = std::move(seen);
  counts_ = std::move(kept);
}

std::vector<int64_t> WordCounts::by_count(int64_t count) const {
  std::vector<int64_t> order(counts_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin() + kReservedWords, order.end(), [&](int64_t a, int64_t b) {
    return counts_[static_cast<size_t>(a)] > counts_[static_cast<size_t>(b)];
  });
  order.resize(std::min(order.size(), static_cast<size_t>(count)));
  return order;
}

Vocabulary WordCounts::most_frequent() const {
  Vocabulary words;
  for (const int64_t id : by_count(max_words_ > 0 ? max_words_ : seen_.size())) {
    words.add(seen_.word(id));
  }
  return words;
}

Vocabulary number_words(int64_t words) {
  Vocabulary numbers;
  for (int64_t number = 0; number < words; ++number) numbers.add(std::to_string(number));
  return numbers;
}

bool has_reserved_words(const Vocabulary& vocabulary) {
  return vocabulary.size() < kReservedWords || vocabulary.word(kEndOfLine) == kReserved[kEndOfLine];
}

std::vector<int64_t> to_tokens(std::string_view text, const Vocabulary& vocabulary) {
  std::vector<int64_t> tokens;
  Tokenizer tokenizer("", 0, kTextBytes, [&](uint8_t* out, size_t bytes) {
    const size_t count = text.copy(reinterpret_cast<char*>(out), bytes);
    text.remove_prefix(count);
    return count;
  });
  while (const auto word = tokenizer.next()) {
    if (!word->empty()) tokens.push_back(number_of(*word, vocabulary));
  }
  return tokens;
}

TokenColumns::TokenColumns(const Tokens& tokens, int64_t columns, int64_t first, int64_t count)
    : tokens_(tokens), column_length_(0), first_(first), count_(count) {
  check(columns >= 1, "the number of columns must be at least 1, not ", columns);
  check(first >= 0 && first < columns, "there is no column ", first);
  check(count >= 1 && count <= columns - first,
        "the columns read must be at least one, and not more than there are, not ", count);
  column_length_ = tokens.size() / columns;
  if (column_length_ < 2) {
    base::bad_data(
        std::to_string(tokens.size()) + " tokens are too few for " + std::to_string(columns) +
        " columns of at least two tokens: a smaller --batch-size or --accumulate makes fewer");
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
  const at::Tensor columns = at::empty({count_, rows + 1}, at::kLong);
  for (int64_t c = 0; c < count_; ++c) {
    tokens_.read((first_ + c) * column_length_ + begin,
                 {columns[c].data_ptr<int64_t>(), static_cast<size_t>(rows + 1)});
  }
  const auto from = [&](int64_t row) {
    return columns.t().narrow(0, row, rows).clone(at::MemoryFormat::Contiguous);
  };
  return {from(0), from(1).flatten()};
}

}  // namespace distrain::data
