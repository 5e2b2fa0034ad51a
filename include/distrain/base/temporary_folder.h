#pragma once

#include <string>

namespace distrain::base {

/// A folder of this process alone (0700), which goes with the object.
class TemporaryFolder {
 public:
  /// In $TMPDIR, or else /tmp. Not there if that cannot be written to.
  TemporaryFolder();
  ~TemporaryFolder() { remove(); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  /// Empty if there is none, or none any more.
  const std::string& path() const { return path_; }
  void remove();

  /// Those that are there now. For a process that leaves by _exit, which destroys no objects.
  static void remove_all();

 private:
  std::string path_;
};

}  // namespace distrain::base
