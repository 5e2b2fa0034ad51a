#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "disk.h"
#include "distrain/net/socket.h"

namespace distrain::data {

/// A folder that is open. What is in it is named relative to it, by names without a '/', and no
/// link there is followed: whoever may write to the folder can put a link anywhere in it, even as
/// we go, and leads us nowhere. Failures are as Disk's.
class OpenFolder {
 public:
  /// By a path of the user's, whose links are followed, also the last: a folder of checkpoints may
  /// well be a link to one on a large disk. None, and errno, if it cannot be opened.
  static std::optional<OpenFolder> at(const Disk& disk, const std::string& path);
  /// A folder in this one. None, and errno, if it cannot be opened.
  std::optional<OpenFolder> open(const std::string& name) const;

  int fd() const { return fd_.get(); }
  /// For messages.
  const std::string& path() const { return path_; }
  std::string path_of(const std::string& name) const;

  enum class Kind { kNothing, kFolder, kLink, kOther };
  Kind kind_of(const std::string& name) const;
  /// None, and errno, if it cannot be read.
  std::optional<std::vector<std::string>> names() const;
  /// Whether the path that it was opened by leads to it still. False, and errno, if to nothing.
  bool is_at_its_path() const;
  /// Whether this name here is what is open as `fd`.
  bool leads_to(const std::string& name, int fd) const;

  OutputFile create(const std::string& name) const { return {*disk_, fd(), name, path_of(name)}; }
  /// False if it was there.
  bool make_folder(const std::string& name) const;
  /// False if there is no `from`.
  bool rename(const std::string& from, const std::string& to) const;
  /// Makes what was created, renamed or removed in this folder last.
  void sync() const;
  /// Removes a folder of files, or as much of it as can be: no error. Of a link, be it in the
  /// folder or in its place, the link itself goes.
  void remove_folder(const std::string& name) const;

 private:
  OpenFolder(const Disk& disk, net::Fd fd, std::string path)
      : disk_(&disk), fd_(std::move(fd)), path_(std::move(path)) {}

  const Disk* disk_;
  net::Fd fd_;
  std::string path_;
};

}  // namespace distrain::data
