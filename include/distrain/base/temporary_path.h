#pragma once

#include <mutex>
#include <string>

namespace distrain::base {

/// A file or folder that is removed with this object, or by remove_all() when the process ends.
class TemporaryPath {
 public:
  TemporaryPath() = default;
  /// What is there, or is about to be made there.
  explicit TemporaryPath(std::string path);

  ~TemporaryPath() { remove(); }
  TemporaryPath(TemporaryPath&& other) noexcept : path_(std::move(other.path_)) {
    other.path_.clear();
  }
  TemporaryPath& operator=(TemporaryPath&& other) noexcept {
    std::swap(path_, other.path_);
    return *this;
  }

  /// Empty if there is none, or none any more.
  const std::string& path() const { return path_; }
  void remove();
  /// It is there to stay, or is not there any more.
  void keep();

  /// Removes all that are there now. For a process that leaves by _exit, which destroys no objects:
  /// while it has what is given back, no further one comes.
  [[nodiscard]] static std::unique_lock<std::mutex> remove_all();

 private:
  std::string path_;
};

}  // namespace distrain::base
