#pragma once

#include <cerrno>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "distrain/net/socket.h"

namespace distrain::store {

/// Maximum size of a buffer through which a file is written, read or sent.
inline constexpr size_t kPieceBytes = size_t{4} << 20;

/// Makes the system calls of a save, and calls a probe before each. Unless stated otherwise,
/// failures throw `resources` with path and reason.
class Disk {
 public:
  using Probe = std::function<void(const char* name)>;
  explicit Disk(Probe before_system_call = {}) : probe_(std::move(before_system_call)) {}
  Disk(const Disk&) = delete;

  /// Calls `function`, repeats it after EINTR, and returns the last result; if -1, errno is set.
  auto call(const char* name, auto function) const {
    for (;;) {
      if (probe_) probe_(name);
      const auto result = function();
      if (result >= 0 || errno != EINTR) return result;
    }
  }

  /// Syncs the file or folder `fd` to disk.
  void sync(const net::Fd& fd, const std::string& path) const;
  [[noreturn]] static void fail(const char* what, const std::string& path);

 private:
  const Probe probe_;
};

/// The size of a file and the content_hash() of its bytes.
struct FileSum {
  uint64_t bytes = 0;
  uint64_t hash = 0;
  static constexpr auto kFields = std::tuple(&FileSum::bytes, &FileSum::hash);
};

/// A new file that is open for writing. Its content is safely on disk only after finish().
class OutputFile {
 public:
  /// `name` is relative to the open `folder`, which may be AT_FDCWD. Error messages show `path`.
  /// Creates the file, which must not exist, or opens it if `exists`. Does not follow a link.
  OutputFile(const Disk& disk, int folder, const std::string& name, std::string path,
             bool exists = false);

  /// Appends `bytes` to those of earlier calls of write().
  void write(std::span<const uint8_t> bytes) {
    write_at(end_, bytes);
    end_ += bytes.size();
  }
  /// Writes `bytes` at `offset`. Threads may write different ranges at the same time.
  void write_at(uint64_t offset, std::span<const uint8_t> bytes) const;
  void sync() const { disk_.sync(fd_, path_); }
  /// Syncs the file to disk and closes it.
  void finish() {
    sync();
    close();
  }
  /// Does the same as finish(), but reads the file before it is closed, to compute its hash.
  FileSum finish_with_sum();

 private:
  void close();

  const Disk& disk_;
  const std::string path_;
  net::Fd fd_;
  uint64_t end_ = 0;
};

/// An open folder. File names are relative to it and contain no '/'. Symbolic links are not
/// followed, because another user who can write to the folder could redirect the job by a link at
/// any time. Failures throw as in Disk.
class OpenFolder {
 public:
  /// Opens a user-supplied path. Follows links, because a folder of checkpoints may be a link to a
  /// large disk. Returns nullopt and sets errno if it cannot be opened.
  static std::optional<OpenFolder> at(const Disk& disk, const std::string& path);
  /// Opens a folder in this one. Returns nullopt and sets errno if it cannot be opened.
  std::optional<OpenFolder> open(const std::string& name) const;

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  std::string path_of(const std::string& name) const {
    return path_ + (path_.ends_with('/') ? "" : "/") + name;
  }

  enum class Kind { kNothing, kFolder, kLink, kOther };
  Kind kind_of(const std::string& name) const;
  /// Lists the folder. Returns nullopt and sets errno if it cannot be read.
  std::optional<std::vector<std::string>> names() const;
  /// Returns true if path() still leads to this folder. If it leads to another, sets errno to 0.
  bool is_at_its_path() const;
  /// Returns true if `name` in this folder is the file that is open as `fd`.
  bool leads_to(const std::string& name, int fd) const;

  OutputFile create(const std::string& name) const { return {*disk_, fd(), name, path_of(name)}; }
  /// Opens a file for writing. The file must exist.
  OutputFile reopen(const std::string& name) const {
    return {*disk_, fd(), name, path_of(name), /*exists=*/true};
  }
  /// Creates a folder. Returns false if `name` exists.
  bool make_folder(const std::string& name) const;
  /// Renames a file or folder. Returns false if `from` does not exist.
  bool rename(const std::string& from, const std::string& to) const;
  /// Syncs the folder, so that earlier creations, renames and removals in it survive a crash.
  void sync() const { disk_->sync(fd_, path_); }
  /// Removes a folder and its files as far as possible, and ignores errors. If `name` or a file in
  /// the folder is a symbolic link, removes only the link.
  void remove_folder(const std::string& name) const;

 private:
  OpenFolder(const Disk& disk, net::Fd fd, std::string path)
      : disk_(&disk), fd_(std::move(fd)), path_(std::move(path)) {}

  const Disk* disk_;
  net::Fd fd_;
  std::string path_;
};

}  // namespace distrain::store
