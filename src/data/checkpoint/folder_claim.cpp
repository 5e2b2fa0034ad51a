#include "folder_claim.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <utility>

#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "checkpoint_manifest.h"
#include "distrain/base/error.h"
#include "save_folders.h"

namespace distrain::data {
namespace {

OpenFolder opened(const Disk& disk, const std::string& path) {
  auto folder = OpenFolder::at(disk, path);
  if (!folder) Disk::fail("cannot open", path);
  return *std::move(folder);
}

// As mkdir -p does.
OpenFolder made(const Disk& disk, const std::string& path) {
  if (auto folder = OpenFolder::at(disk, path)) return *std::move(folder);
  if (errno != ENOENT || path == ".") Disk::fail("cannot open", path);
  const size_t slash = path.find_last_of('/');
  const OpenFolder parent =
      made(disk, slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1)));
  if (parent.make_folder(path.substr(slash + 1))) parent.sync();
  return opened(disk, path);
}

// A manifest that is damaged, or of before there were generations, has none.
int64_t generation_of(const OpenFolder& folder, const std::string& save) {
  try {
    return read_manifest(open_save(folder, save)).generation;
  } catch (const base::Exception&) {
    return 0;
  }
}

// Of all rather than of the newest step: a job may go on from an old one.
int64_t highest_generation(const OpenFolder& folder) {
  const auto saves = find_saves(folder);
  if (!saves) Disk::fail("cannot read", folder.path());
  int64_t highest = 0;
  for (const int64_t step : saves->steps()) {
    highest = std::max(highest, generation_of(folder, saves->name(step)));
  }
  return highest;
}

// " (process 1234)", as far as the kernel tells: /proc/locks has lines like
//   1: FLOCK  ADVISORY  WRITE 1234 08:01:131075 0 EOF
std::string owner_of_lock(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return {};
  char file[64];
  std::snprintf(file, sizeof file, "%02x:%02x:%llu", major(info.st_dev), minor(info.st_dev),
                static_cast<unsigned long long>(info.st_ino));
  std::ifstream locks("/proc/locks");
  std::string number, type, kind, access, process, locked, range;
  while (locks >> number >> type >> kind >> access >> process >> locked && getline(locks, range)) {
    const bool is_pid = process.find_first_not_of("0123456789") == std::string::npos;
    if (type == "FLOCK" && locked == file && is_pid && process != "0") {
      return " (process " + process + ")";
    }
  }
  return {};
}

}  // namespace

FolderClaim::FolderClaim(const Disk& disk, const std::string& path, Missing missing)
    : folder_(missing == Missing::kMake ? made(disk, path) : opened(disk, path)) {
  lock();
  generation_ = highest_generation(folder_) + 1;
}

void FolderClaim::lock() const {
  const int fd = folder_.fd();
  if (folder_.disk().call("flock", [fd] { return ::flock(fd, LOCK_EX | LOCK_NB); }) == 0) return;
  if (errno != EWOULDBLOCK) return;  // a file system without locks: the generations have to do
  base::bad_data("another job saves in this folder: " + folder_.path() + owner_of_lock(fd));
}

void FolderClaim::check() const {
  if (!folder_.is_at_its_path()) {
    if (errno != 0) Disk::fail("cannot save in", folder_.path());
    throw base::Exception(base::ErrorKind::kResources,
                          folder_.path() + ": another folder stands where this job has saved");
  }
  const int64_t highest = highest_generation(folder_);
  if (highest <= generation_) return;
  base::bad_data("another job has taken over " + folder_.path() +
                 ": its checkpoints are of generation " + std::to_string(highest) +
                 ", this job's of " + std::to_string(generation_));
}

}  // namespace distrain::data
