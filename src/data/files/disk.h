#pragma once

#include <cerrno>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace distrain::data {

/// The system calls of saving, each told to a probe before it is made. Failures are `resources`,
/// with the path and the system's reason, unless said otherwise.
class Disk {
 public:
  using Probe = std::function<void(const char* name)>;
  explicit Disk(const Probe& before_system_call) : probe_(before_system_call) {}

  /// False if it was there.
  bool make_folder(const std::string& path) const;
  /// False if there is no `from`.
  bool rename(const std::string& from, const std::string& to) const;
  /// Makes what was created, renamed or removed in a folder last.
  void sync_folder(const std::string& path) const;
  /// The names in a folder; none, and errno, if it cannot be read.
  std::optional<std::vector<std::string>> list(const std::string& path) const;
  /// Removes a folder of files, or as much of it as can be: no error. Follows no link: of one, be
  /// it in the folder or in its place, the link itself goes.
  void remove_folder(const std::string& path) const;

  [[noreturn]] static void fail(const char* what, const std::string& path);

 private:
  friend class OutputFile;
  class Folder;

  // errno is that of the call: the probe comes before.
  template <class F>
  auto call(const char* name, F function) const {
    if (probe_) probe_(name);
    auto result = function();
    while (result < 0 && errno == EINTR) {
      if (probe_) probe_(name);
      result = function();
    }
    return result;
  }
  void close(int fd, const std::string& path) const;

  const Probe& probe_;
};

/// A new file. Nothing is sure before finish().
class OutputFile {
 public:
  OutputFile(const Disk& disk, const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const uint8_t> bytes);
  /// Waits until the file is on the disk, and closes it.
  void finish();

 private:
  const Disk& disk_;
  const std::string path_;
  int fd_;
};

}  // namespace distrain::data
