#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "distrain/base/error.h"
#include "distrain/net/socket.h"

// The state of zlib, declared here so that users of this header do not need zlib's header.
struct z_stream_s;

namespace distrain::store {

class OpenFolder;

/// Throws `bad_data`: the message says that `path` cannot be opened, with the reason from errno.
[[noreturn]] void fail_open(const std::string& path);

/// The end of an error message about a symbolic link.
inline constexpr const char* kNotFollowed = ": a symbolic link, which is not followed";

/// A signal to a thread that reads files, so that the thread stops, also while it waits for a pipe.
class Interrupt {
 public:
  /// Throws `resources` if no file descriptor is left.
  Interrupt();

  /// Sets the signal. Any thread may call it.
  void set();
  bool is_set() const { return set_.load(std::memory_order_relaxed); }
  /// Returns a file descriptor that is readable once the signal is set.
  int fd() const { return event_.get(); }

 private:
  net::Fd event_;
  std::atomic<bool> set_ = false;
};

/// A file open for reading. Failures throw `bad_data` with the path and the reason.
class InputFile {
 public:
  /// Limits the waits of an InputFile.
  struct Waiting {
    const Interrupt* interrupt;              ///< if set, reading throws `cancelled`
    std::chrono::milliseconds writer_limit;  ///< how long a named pipe may have no writer
  };

  enum class Kind {
    kAny,      ///< any file, such as a pipe
    kRegular,  ///< a regular file; throws for any other file, without waiting for a pipe's writer
  };
  explicit InputFile(const std::string& path, Kind kind = Kind::kAny);
  /// Opens any file, or the standard input if `path` is "-". Does not wait for a pipe's writer;
  /// reading throws if a named pipe has no writer within the limit.
  InputFile(const std::string& path, Waiting waiting);
  /// Opens a regular file in `folder`. Throws if it is a symbolic link.
  InputFile(const OpenFolder& folder, const std::string& name);

  /// Reads `bytes` bytes, or fewer at the end of the file, and returns their number.
  size_t read(void* out, size_t bytes) const;
  /// Waits until the file has bytes to read, reads at most `bytes` of them, and returns their
  /// number. Returns 0 at the end of the file.
  size_t read_some(void* out, size_t bytes) const;

  /// Reads all of `out` from `offset` on. Threads may call it at the same time. Throws if the file
  /// ends before.
  void read_at(uint64_t offset, std::span<uint8_t> out) const;

  /// Continues reading at byte `offset` of a regular file.
  void seek(uint64_t offset) const;

  /// Returns the size that a regular file had when it was opened, or 0 for a pipe.
  uint64_t size() const { return size_; }
  /// Returns the present size of a regular file, or 0 for a pipe.
  uint64_t current_size() const;
  const std::string& path() const { return path_; }

 private:
  InputFile(net::Fd fd, std::string path, Kind kind);
  bool wait_for_bytes() const;

  std::string path_;
  net::Fd fd_;
  uint64_t size_ = 0;
  bool regular_ = false;
  std::optional<Waiting> waiting_;
  mutable bool awaits_writer_ = false;  // of a named pipe; used by the thread that reads
};

/// The number of bytes that may be read.
struct ReadLimit {
  uint64_t bytes = std::numeric_limits<uint64_t>::max();
  std::string whose{};  ///< follows "longer than the N bytes" in the message that it is exceeded
};

/// Reads a file, and decompresses it if it begins with the two bytes of gzip. The caller limits the
/// decompressed length, because a small file may decompress to a thousand times its size.
class GzipReader {
 public:
  /// Reads a file that is open at its first byte. Throws `bad_data` if it cannot be read.
  explicit GzipReader(InputFile file, ReadLimit limit = {});
  ~GzipReader();

  bool gzip() const { return gzip_; }
  /// Replaces the limit. The new limit counts only the bytes read after this call.
  void limit(ReadLimit limit) {
    limit_ = std::move(limit);
    left_ = limit_.bytes;
  }
  /// Reads `bytes` bytes, or fewer if the file ends before, and returns their number. All checksums
  /// are verified when the end is reached. Throws `bad_data` if the file is damaged, or if the
  /// caller asks for more bytes than ReadLimit::bytes allows and the file has more.
  size_t read(void* out, size_t bytes);
  /// Waits until some bytes can be read, reads at most `bytes` of them without regard to the limit,
  /// and returns their number. Returns 0 at the end of the file. Throws as read().
  size_t read_some(void* out, size_t bytes);
  /// Continues reading at byte `offset` of a regular file that is not gzip.
  void seek(uint64_t offset);

  /// Returns the size of the file as it is stored, or 0 for a pipe.
  uint64_t size() const { return file_.size(); }
  const std::string& path() const { return file_.path(); }
  const InputFile& file() const { return file_; }

 private:
  size_t inflate_some(uint8_t* out, size_t bytes);

  InputFile file_;
  ReadLimit limit_;
  uint64_t left_;  // number of bytes that may still be read under `limit_`
  std::array<uint8_t, 64 * 1024> input_;
  std::unique_ptr<z_stream_s> stream_;  // has the unread part of input_, even if not gzip
  bool gzip_ = false;
  bool between_members_ = false;  // at the end of a gzip member, which another one may follow
};

/// Reads the rest of `file`, an InputFile or GzipReader, into a std::string or
/// std::vector<uint8_t>. Does not rely on the file's size, because it may be a pipe. Throws
/// `bad_data` if the file has more than `limit` bytes.
template <class Bytes>
Bytes read_to_end(auto&& file, size_t limit = std::numeric_limits<ptrdiff_t>::max() - 1) {
  Bytes bytes;
  size_t used = 0;
  bytes.resize(std::min<size_t>(file.size(), limit) + 1);  // + 1: finds the end at once
  while ((used += file.read(bytes.data() + used, bytes.size() - used)) == bytes.size()) {
    if (used > limit) {
      base::bad_data(file.path() + ": longer than " + std::to_string(limit) + " bytes");
    }
    bytes.resize(std::min(std::max<size_t>(size_t{64} << 10, 2 * used), limit + 1));
  }
  bytes.resize(used);
  return bytes;
}

/// Returns the result of `function`. Throws `resources` with `path` if memory for it is short.
auto with_memory_for(const std::string& path, auto function) {
  try {
    return function();
  } catch (const std::length_error&) {
    throw base::Exception(base::ErrorKind::kResources, path + " is too large");
  } catch (const std::bad_alloc&) {
    throw base::Exception(base::ErrorKind::kResources, "no memory for " + path);
  }
}

}  // namespace distrain::store
