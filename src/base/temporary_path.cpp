#include "distrain/base/temporary_path.h"

#include <filesystem>
#include <set>
#include <utility>

namespace distrain::base {

namespace {

/// The owned paths. Never destroyed, because threads may still run when the process exits.
struct Paths {
  std::mutex mutex;
  std::set<std::string> all;
};

Paths& paths() {
  static auto* const instance = new Paths;
  return *instance;
}

void remove_from_disk(const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

}  // namespace

TemporaryPath::TemporaryPath(std::string path) : path_(std::move(path)) {
  std::lock_guard lock(paths().mutex);
  paths().all.insert(path_);
}

TemporaryPath::~TemporaryPath() {
  std::lock_guard lock(paths().mutex);
  if (paths().all.erase(path_) > 0) remove_from_disk(path_);
}

void TemporaryPath::keep() {
  std::lock_guard lock(paths().mutex);
  paths().all.erase(path_);
}

std::unique_lock<std::mutex> TemporaryPath::remove_all() {
  std::unique_lock lock(paths().mutex);
  for (const std::string& path : paths().all) remove_from_disk(path);
  paths().all.clear();
  return lock;
}

}  // namespace distrain::base
