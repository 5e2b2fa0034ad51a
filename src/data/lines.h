#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/store/file.h"
#include "source_files.h"

namespace distrain::data {

inline constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // of UTF-8

/// Reads lines of a file in chunks, with the memory of a chunk and of the longest line. Throws
/// `bad_data` if the file is damaged, no text, changes its size, or has a line above 64 MiB.
class LineReader {
 public:
  /// Starts at the first line whose first byte is at `begin` or later; reads the lines whose first
  /// byte is before `end`. Reads bytes before `begin`, too, if `file` is gzip or a pipe. Without
  /// `waiting`, the file must be a regular one.
  LineReader(const SourceFile& file, uint64_t begin, uint64_t end,
             std::optional<store::InputFile::Waiting> waiting);

  /// Returns the next line, without its \n and without a byte order mark, or nullopt after the last
  /// one. The view is valid until the next call.
  std::optional<std::string_view> next() {
    if (offset() < end_) return read_line();
    check_size();
    return std::nullopt;
  }

  /// Returns the byte of the file that follows the last line.
  uint64_t offset() const { return buffer_offset_ + at_; }

  /// Returns `FILE:LINE:COLUMN` of byte `at` of the last line. If reading did not start at the
  /// file's beginning, reads the file up to there.
  std::string place(size_t at) const;

 private:
  std::optional<std::string_view> read_line();
  bool fill();
  void check_size() const {
    const uint64_t size = reader_.file().current_size();
    if (file_.kind == SourceFile::Kind::kPipe || size == file_.size) return;
    base::bad_data(fmt::format("{}: changed while it was read: it had {} bytes and now has {}",
                               file_.path, file_.size, size));
  }

  const SourceFile file_;
  const std::optional<store::InputFile::Waiting> waiting_;
  store::GzipReader reader_;
  uint64_t end_ = Piece::kToEnd;
  std::vector<char> buffer_;
  size_t at_ = 0, filled_ = 0;  // buffer_[at_, filled_) is not returned yet
  uint64_t buffer_offset_ = 0;  // of buffer_[0] in the file
  int64_t lines_ = 0;           // that were read, without those before the byte `counted_from_`
  uint64_t counted_from_ = 0;
  size_t skipped_ = 0;  // bytes of a byte order mark before the last line
};

}  // namespace distrain::data
