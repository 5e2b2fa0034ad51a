#pragma once

#include <mutex>
#include <string>

namespace distrain::base {

/// A file or folder that is removed with this object, or by remove_all() when the process exits.
class TemporaryPath {
 public:
  TemporaryPath() = default;
  /// Takes ownership of `path`, which exists or is about to be created.
  explicit TemporaryPath(std::string path);

  ~TemporaryPath() { remove(); }
  TemporaryPath(TemporaryPath&& other) noexcept : path_(std::move(other.path_)) {
    other.path_.clear();
  }
  TemporaryPath& operator=(TemporaryPath&& other) noexcept {
    std::swap(path_, other.path_);
    return *this;
  }

  /// Returns the path, or an empty text if this object owns none.
  const std::string& path() const { return path_; }
  void remove();
  /// Releases the path without removing it, for example because it was renamed.
  void keep();

  /// Removes the paths of all objects, for a process that calls _exit(), which runs no destructors.
  /// While the caller holds the returned lock, no new object can be made.
  [[nodiscard]] static std::unique_lock<std::mutex> remove_all();

 private:
  std::string path_;
};

}  // namespace distrain::base
