#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <zlib.h>

#include "files/file.h"

namespace distrain::data {

/// Reads a file, decompressing it if it is gzip (its first bytes tell, not its name).
class GzipReader {
 public:
  /// Throws `bad_data`, as read() does.
  explicit GzipReader(const std::string& path, InputFile::Kind kind = InputFile::Kind::kRegular);
  ~GzipReader();
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  /// The next `bytes` bytes, fewer at the end only. There every check sum has been checked.
  size_t read(uint8_t* out, size_t bytes);

 private:
  size_t inflate_some(uint8_t* out, size_t bytes);
  bool fill();
  [[noreturn]] void fail(const char* reason) const;

  const std::string path_;
  InputFile file_;
  std::array<uint8_t, 64 * 1024> input_;
  z_stream stream_{};  // next_in and avail_in say what of input_ is left, whether gzip or not
  bool gzip_ = false;
  bool between_members_ = false;  // a gzip file may be several, one after the other
};

}  // namespace distrain::data
