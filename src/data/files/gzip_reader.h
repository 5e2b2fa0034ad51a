#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <zlib.h>

#include "file.h"

namespace distrain::data {

/// Reads a file, decompressing it if it is gzip (its first bytes tell, not its name). A small file
/// may decompress to a thousand times its size: so who reads it says how long it may be.
class GzipReader {
 public:
  struct Limit {
    uint64_t bytes = 0;
    std::string whose;  ///< for the message, "that its header says"
  };

  /// Throws `bad_data`, as read() does.
  GzipReader(const std::string& path, Limit limit,
             InputFile::Kind kind = InputFile::Kind::kRegular);
  ~GzipReader();

  /// From now on: of what follows.
  void limit(Limit limit);
  /// The next `bytes` bytes, fewer at the end only. There every check sum has been checked. Refuses
  /// a longer file than the limit when it is asked for more.
  size_t read(uint8_t* out, size_t bytes);

 private:
  size_t read_some(uint8_t* out, size_t bytes);
  size_t inflate_some(uint8_t* out, size_t bytes);

  InputFile file_;
  Limit limit_;
  uint64_t left_;  // of the limit
  std::array<uint8_t, 64 * 1024> input_;
  z_stream stream_{};  // next_in and avail_in say what of input_ is left, whether gzip or not
  bool gzip_ = false;
  bool between_members_ = false;  // a gzip file may be several, one after the other
};

}  // namespace distrain::data
