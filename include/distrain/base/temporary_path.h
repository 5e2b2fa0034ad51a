#pragma once

#include <mutex>
#include <string>

namespace distrain::base {

/// A file or folder that is removed with this object, or by remove_all() when the process exits.
class TemporaryPath {
 public:
  /// Takes ownership of `path`, which exists or is about to be created. No other object has it.
  explicit TemporaryPath(std::string path);
  ~TemporaryPath();
  TemporaryPath(const TemporaryPath&) = delete;
  TemporaryPath& operator=(const TemporaryPath&) = delete;

  const std::string& path() const { return path_; }
  /// Releases the path without removing it, for example because it was renamed.
  void keep();

  /// Removes the paths of all objects, for a process that calls _exit(), which runs no destructors.
  /// While the caller holds the returned lock, no new object can be made.
  [[nodiscard]] static std::unique_lock<std::mutex> remove_all();

 private:
  const std::string path_;
};

}  // namespace distrain::base
