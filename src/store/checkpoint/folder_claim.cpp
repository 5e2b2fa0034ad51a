#include "folder_claim.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "checkpoint_manifest.h"
#include "distrain/base/error.h"
#include "distrain/store/file.h"
#include "save_folders.h"

namespace distrain::store {
namespace {

constexpr const char* kLock = ".lock";

OpenFolder opened(const Disk& disk, const std::string& path) {
  auto folder = OpenFolder::at(disk, path);
  if (!folder) Disk::fail("cannot open", path);
  return *std::move(folder);
}

// Creates parent folders as needed.
OpenFolder made(const Disk& disk, const std::string& path) {
  if (auto folder = OpenFolder::at(disk, path)) return *std::move(folder);
  if (errno != ENOENT || path == ".") Disk::fail("cannot open", path);
  const size_t slash = path.find_last_of('/');
  const OpenFolder parent =
      made(disk, slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1)));
  if (parent.make_folder(path.substr(slash + 1))) parent.sync();
  return opened(disk, path);
}

// Reads all checkpoints, because a job may resume from one that is not the newest.
int64_t highest_generation(const OpenFolder& folder) {
  const auto saves = find_saves(folder);
  if (!saves) Disk::fail("cannot read", folder.path());
  int64_t highest = 0;
  for (const int64_t step : saves->steps()) {
    try {
      highest = std::max(highest, read_manifest(open_save(folder, saves->name(step))).generation);
    } catch (const base::Exception&) {  // a damaged manifest has no generation
    }
  }
  return highest;
}

// Returns " (process 1234)", or "" if the kernel does not tell. Lines of /proc/locks look like
//   1: FLOCK  ADVISORY  WRITE 1234 08:01:131075 0 EOF
std::string owner_of_lock(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return {};
  const std::string file =
      fmt::format("{:02x}:{:02x}:{}", major(info.st_dev), minor(info.st_dev), info.st_ino);
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

FolderClaim::FolderClaim(Disk::Probe before_system_call, const std::string& path, Missing missing)
    : disk_(std::move(before_system_call)),
      folder_(missing == Missing::kMake ? made(disk_, path) : opened(disk_, path)) {
  lock();
  highest_expected_ = highest_generation(folder_);
  generation_ = highest_expected_ + 1;
}

void FolderClaim::lock() {
  const std::string path = folder_.path_of(kLock);
  // NFS requires write access for an exclusive lock.
  net::Fd fd(disk_.call("openat", [this] {
    return ::openat(folder_.fd(), kLock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK,
                    0666);
  }));
  if (!fd.valid() && errno == ELOOP) base::bad_data(path + kNotFollowed);
  if (!fd.valid()) Disk::fail("cannot create", path);
  if (disk_.call("flock", [&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) == 0) {
    lock_ = std::move(fd);
  } else if (errno != EWOULDBLOCK) {
    why_no_lock_ = std::strerror(errno);  // only the generations protect the folder
  } else {
    base::bad_data("another job saves in this folder: " + folder_.path() + owner_of_lock(fd.get()));
  }
}

void FolderClaim::check() {
  if (!folder_.is_at_its_path()) {
    if (errno != 0) Disk::fail("cannot save in", folder_.path());
    throw base::Exception(base::ErrorKind::kResources,
                          folder_.path() + ": another folder stands where this job has saved");
  }
  // If the lock file was removed, another job could lock a new one.
  if (lock_.valid() && !folder_.leads_to(kLock, lock_.get())) lock();
  const int64_t highest = highest_generation(folder_);
  if (highest <= highest_expected_) return;
  base::bad_data("another job has taken over " + folder_.path() +
                 ": it has saved there, as generation " + std::to_string(highest));
}

}  // namespace distrain::store
