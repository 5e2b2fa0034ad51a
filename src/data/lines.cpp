#include "lines.h"

#include <algorithm>
#include <cstring>

namespace distrain::data {

namespace {

constexpr size_t kReadBytes = size_t{1} << 20;
constexpr size_t kMaxLine = size_t{64} << 20;

store::InputFile open(const SourceFile& file, std::optional<store::InputFile::Waiting> waiting) {
  if (waiting) return {file.path, *waiting};
  return store::InputFile(file.path, store::InputFile::Kind::kRegular);
}

}  // namespace

// The byte before `begin` tells whether a line begins there, so reading starts with that byte, and
// the line that it ends is dropped.
LineReader::LineReader(const SourceFile& file, uint64_t begin, uint64_t end,
                       std::optional<store::InputFile::Waiting> waiting)
    : file_(file), waiting_(waiting), reader_(open(file, waiting)), buffer_(kReadBytes) {
  check_size();
  if (begin > 0) {
    if (file.kind == SourceFile::Kind::kPlain) {
      counted_from_ = buffer_offset_ = begin - 1;
      reader_.seek(counted_from_);
    }
    while (offset() < begin && read_line()) {
    }
  }
  end_ = end;
}

std::optional<std::string_view> LineReader::read_line() {
  size_t length = 0;  // of the line's part in the buffer
  const char* newline = nullptr;
  while (!newline) {
    const size_t searched = at_ + length;
    newline =
        static_cast<const char*>(std::memchr(buffer_.data() + searched, '\n', filled_ - searched));
    length = filled_ - at_;
    if (newline || fill()) continue;
    if (length == 0) return std::nullopt;
    break;  // the last line has no newline
  }
  const bool first = offset() == 0;
  if (newline) length = static_cast<size_t>(newline - buffer_.data()) - at_;
  std::string_view line(buffer_.data() + at_, length);
  at_ += length + (newline ? 1 : 0);
  ++lines_;
  skipped_ = first && line.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
  line.remove_prefix(skipped_);
  return line;
}

// Moves the unread bytes to the front of the buffer and appends some of the file. Returns false at
// the file's end.
bool LineReader::fill() {
  std::copy(buffer_.begin() + static_cast<ptrdiff_t>(at_),
            buffer_.begin() + static_cast<ptrdiff_t>(filled_), buffer_.begin());
  buffer_offset_ += at_;
  filled_ -= at_;
  at_ = 0;
  if (filled_ == buffer_.size()) {
    if (filled_ >= kMaxLine) {
      base::bad_data(file_.path + fmt::format(": a line is longer than {} MiB", kMaxLine >> 20));
    }
    buffer_.resize(2 * filled_);
  }
  const size_t got = reader_.read_some(buffer_.data() + filled_, buffer_.size() - filled_);
  check_size();
  check_text(reader_.path(), buffer_offset_ + filled_,
             std::string_view(buffer_.data() + filled_, got));
  filled_ += got;
  return got > 0;
}

std::string LineReader::place(size_t at) const {
  int64_t line = lines_;
  if (counted_from_ > 0) {
    const store::InputFile file = open(file_, waiting_);
    std::vector<char> bytes(kReadBytes);
    for (uint64_t left = counted_from_; left > 0;) {
      const size_t got = file.read(bytes.data(), std::min<uint64_t>(left, bytes.size()));
      if (got == 0) break;
      line += std::count(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(got), '\n');
      left -= got;
    }
  }
  return fmt::format("{}:{}:{}", reader_.path(), line, skipped_ + at + 1);
}

}  // namespace distrain::data
