#include "distrain/base/temporary_folder.h"

#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <set>
#include <utility>

namespace distrain::base {

namespace {

/// All that are there. Never destroyed: threads may still be at work when the process ends.
struct Folders {
  std::mutex mutex;
  std::set<std::string> paths;
};

Folders& folders() {
  static auto* const all = new Folders;
  return *all;
}

void remove_folder(const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::error_code none;
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(none);
  if (none) return;
  std::string pattern = (temporary / "distrain-XXXXXX").string();
  Folders& all = folders();
  std::lock_guard lock(all.mutex);
  if (!mkdtemp(pattern.data())) return;
  path_ = pattern;
  all.paths.insert(path_);
}

void TemporaryFolder::remove() {
  if (path_.empty()) return;
  Folders& all = folders();
  std::lock_guard lock(all.mutex);
  remove_folder(path_);
  all.paths.erase(std::exchange(path_, {}));
}

void TemporaryFolder::remove_all() {
  Folders& all = folders();
  std::lock_guard lock(all.mutex);
  for (const std::string& path : all.paths) remove_folder(path);
  all.paths.clear();
}

}  // namespace distrain::base
