#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "distrain/store/file.h"

struct z_stream_s;  // zlib's state, whose header the users of this one do not need

namespace distrain::store {

/// Reads a file and decompresses it if its first bytes are those of gzip. The caller limits the
/// length, because a small file may decompress to a thousand times its size.
class GzipReader {
 public:
  struct Limit {
    uint64_t bytes = 0;
    std::string whose;  ///< explains the limit in messages, as in "that its header says"
  };

  /// Throws `bad_data`, as read() does.
  GzipReader(const std::string& path, Limit limit,
             InputFile::Kind kind = InputFile::Kind::kRegular);
  ~GzipReader();

  /// Limits the bytes that follow.
  void limit(Limit limit);
  /// Reads `bytes` bytes. Reads fewer only at the end of the file, when all checksums have been
  /// verified. Throws `bad_data` if the file is damaged, or if `bytes` reaches beyond the limit and
  /// the file is longer than the limit.
  size_t read(uint8_t* out, size_t bytes);

 private:
  size_t read_some(uint8_t* out, size_t bytes);
  size_t inflate_some(uint8_t* out, size_t bytes);

  InputFile file_;
  Limit limit_;
  uint64_t left_;  // what is left of the limit
  std::array<uint8_t, 64 * 1024> input_;
  std::unique_ptr<z_stream_s> stream_;  // next_in and avail_in: unread input_, gzip or not
  bool gzip_ = false;
  bool between_members_ = false;  // a gzip file may have several members
};

}  // namespace distrain::store
