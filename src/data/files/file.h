#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "distrain/base/error.h"
#include "distrain/net/socket.h"

namespace distrain::data {

class OpenFolder;

/// Throws `bad_data` for what could not be opened, with what errno says.
[[noreturn]] void fail_open(const std::string& path);

/// Why a link is refused where none may be.
inline constexpr const char* kNotFollowed = ": a symbolic link, which is not followed";

/// A file open for reading. Every failure is `bad_data` with its path and the system's reason.
class InputFile {
 public:
  enum class Kind {
    kAny,      ///< a pipe, too
    kRegular,  ///< whatever else is there is refused, and never waited for
  };
  explicit InputFile(const std::string& path, Kind kind = Kind::kAny);
  /// A regular file in this folder; a link is refused.
  InputFile(const OpenFolder& folder, const std::string& name);

  /// Some of what comes next, at most `bytes`; 0 at the end.
  size_t read(void* out, size_t bytes) const;

  /// 0 for what is not a regular file.
  uint64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  InputFile(net::Fd fd, std::string path, Kind kind);

  const std::string path_;
  const net::Fd fd_;
  uint64_t size_ = 0;
};

/// The whole of a file, as std::string or std::vector<uint8_t>. Reads to the end rather than by
/// size: the path may be a pipe. Throws `bad_data` for a file of more than `limit` bytes.
template <class Bytes>
Bytes read_to_end(const InputFile& file, size_t limit = std::numeric_limits<ptrdiff_t>::max() - 1) {
  Bytes bytes;
  bytes.resize(std::min<size_t>(file.size(), limit) + 1);  // one more, to see the end at once
  size_t used = 0;
  while (const size_t got = file.read(bytes.data() + used, bytes.size() - used)) {
    used += got;
    if (used > limit) {
      base::bad_data(file.path() + ": longer than " + std::to_string(limit) + " bytes");
    }
    if (used == bytes.size()) {
      bytes.resize(std::min(std::max<size_t>(size_t{64} << 10, 2 * used), limit + 1));
    }
  }
  bytes.resize(used);
  return bytes;
}

/// What `function` returns; no memory for what is in `path` becomes `resources`.
auto with_memory_for(const std::string& path, auto function) {
  try {
    return function();
  } catch (const std::length_error&) {
    throw base::Exception(base::ErrorKind::kResources, path + " is too large");
  } catch (const std::bad_alloc&) {
    throw base::Exception(base::ErrorKind::kResources, "no memory for " + path);
  }
}

}  // namespace distrain::data
