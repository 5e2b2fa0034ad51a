#include "checkpoint_folder.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "distrain/base/text.h"
#include "distrain/store/file.h"

namespace distrain::store {
namespace {

constexpr size_t kStepDigits = 12;
constexpr const char* kLock = ".lock";
constexpr std::string_view kDigits = "0123456789";

// Returns the step in `name`, or nullopt if `name` is not `prefix` followed by a step.
std::optional<int64_t> step_of(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix) || name.size() != prefix.size() + kStepDigits) return std::nullopt;
  const std::string_view digits = name.substr(prefix.size());
  if (digits.find_first_not_of(kDigits) != std::string_view::npos) return std::nullopt;
  return base::number<int64_t>(digits);
}

// Opens a folder. If it does not exist and `missing` is kMake, creates it and its parents first.
OpenFolder open_or_make(const Disk& disk, const std::string& path, Missing missing) {
  if (auto folder = OpenFolder::at(disk, path)) return *std::move(folder);
  if (missing == Missing::kRefuse || errno != ENOENT || path == ".") {
    Disk::fail("cannot open", path);
  }
  const size_t slash = path.find_last_of('/');
  const std::string above =
      slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  const OpenFolder parent = open_or_make(disk, above, missing);
  if (parent.make_folder(path.substr(slash + 1))) parent.sync();
  return open_or_make(disk, path, Missing::kRefuse);
}

// Returns the highest generation of all checkpoints, which need not be that of the highest step.
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

// Returns " (process 1234)", or "" if the owner is unknown. Lines of /proc/locks look like
//   1: FLOCK  ADVISORY  WRITE 1234 08:01:131075 0 EOF
std::string owner_of_lock(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return {};
  const std::string file =
      fmt::format("{:02x}:{:02x}:{}", major(info.st_dev), minor(info.st_dev), info.st_ino);
  std::ifstream locks("/proc/locks");
  std::string number, type, kind, access, process, locked, range;
  while (locks >> number >> type >> kind >> access >> process >> locked && getline(locks, range)) {
    const bool is_pid = process.find_first_not_of(kDigits) == std::string::npos;
    if (type == "FLOCK" && locked == file && is_pid && process != "0") {
      return " (process " + process + ")";
    }
  }
  return {};
}

}  // namespace

std::string name_of(std::string_view prefix, int64_t step) {
  return fmt::format("{}{:0{}}", prefix, step, kStepDigits);
}

bool is_checkpoint(std::string_view name) { return step_of(kWhole, name).has_value(); }

std::optional<Saves> find_saves(const OpenFolder& folder) {
  const auto names = folder.names();
  if (!names) return std::nullopt;
  Saves saves;
  for (const std::string& name : *names) {
    if (step_of(kUnfinished, name) || step_of(kOld, name)) saves.remains.insert(name);
    const auto whole = step_of(kWhole, name);
    const auto step = whole ? whole : step_of(kReplaced, name);
    if (!step) continue;
    const auto kind = folder.kind_of(name);
    const bool is_link = kind == OpenFolder::Kind::kLink;
    // Keeps the smallest name, so that the error does not depend on the order of names().
    if (is_link && (!saves.link || name < *saves.link)) saves.link = name;
    if (is_link || kind == OpenFolder::Kind::kFolder) {
      (whole ? saves.whole : saves.replaced).insert(*step);
    }
  }
  return saves;
}

OpenFolder open_save(const OpenFolder& folder, const std::string& name) {
  if (auto save = folder.open(name)) return *std::move(save);
  const int error = errno;
  if (folder.kind_of(name) == OpenFolder::Kind::kLink) {
    base::bad_data(folder.path_of(name) + kNotFollowed);
  }
  errno = error;
  fail_open(folder.path_of(name));
}

FolderClaim::FolderClaim(Disk::Probe before_system_call, const std::string& path, Missing missing)
    : disk_(std::move(before_system_call)), folder_(open_or_make(disk_, path, missing)) {
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
  // If the lock file was removed, creates and locks a new one before another job can.
  if (lock_.valid() && !folder_.leads_to(kLock, lock_.get())) lock();
  const int64_t highest = highest_generation(folder_);
  if (highest <= highest_expected_) return;
  base::bad_data("another job has taken over " + folder_.path() +
                 ": it has saved there, as generation " + std::to_string(highest));
}

}  // namespace distrain::store
