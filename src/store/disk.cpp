#include "distrain/store/disk.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/store/hash.h"

namespace distrain::store {

constexpr int kFolder = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

// Returns true if `name` in `folder` is the open file `fd`. If it is another file, sets errno to 0.
static bool leads(int folder, const std::string& name, int flags, int fd) {
  struct stat open {};
  struct stat there {};
  if (::fstat(fd, &open) != 0 || ::fstatat(folder, name.c_str(), &there, flags) != 0) return false;
  errno = 0;
  return open.st_dev == there.st_dev && open.st_ino == there.st_ino;
}

void Disk::fail(const char* what, const std::string& path) {
  throw base::Exception(base::ErrorKind::kResources,
                        std::string(what) + " " + path + ": " + std::strerror(errno));
}

void Disk::sync(const net::Fd& fd, const std::string& path) const {
  if (call("fsync", [&] { return ::fsync(fd.get()); }) != 0) fail("cannot write", path);
}

OutputFile::OutputFile(const Disk& disk, int folder, const std::string& name, std::string path,
                       bool exists)
    : disk_(disk), path_(std::move(path)), fd_(disk.call("openat", [&] {
        const int flags = exists ? O_NOFOLLOW : O_CREAT | O_EXCL;
        return ::openat(folder, name.c_str(), O_RDWR | O_CLOEXEC | flags, 0666);
      })) {
  if (!fd_.valid()) Disk::fail(exists ? "cannot open" : "cannot create", path_);
}

void OutputFile::write_at(uint64_t offset, std::span<const uint8_t> bytes) const {
  while (!bytes.empty()) {
    const ssize_t written = disk_.call("pwrite", [&] {
      return ::pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    });
    if (written < 0) Disk::fail("cannot write", path_);
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
}

void OutputFile::close() {
  const int fd = fd_.release();
  // Linux closes the file even if close() is interrupted, so close() must not be retried.
  const int result = disk_.call("close", [&] {
    const int closed = ::close(fd);
    return closed != 0 && errno == EINTR ? 0 : closed;
  });
  if (result != 0) Disk::fail("cannot write", path_);
}

FileSum OutputFile::finish_with_sum() {
  sync();
  struct stat info {};
  if (::fstat(fd_.get(), &info) != 0) Disk::fail("cannot read", path_);
  FileSum sum{.bytes = 0, .hash = 0};
  const auto size = static_cast<uint64_t>(info.st_size);
  std::vector<uint8_t> piece(std::min<uint64_t>(kPieceBytes, size));
  ContentHasher hasher;
  while (sum.bytes < size) {
    const ssize_t got = disk_.call("pread", [&] {
      return ::pread(fd_.get(), piece.data(), piece.size(), static_cast<off_t>(sum.bytes));
    });
    if (got == 0) errno = EIO;  // the file has become shorter
    if (got <= 0) Disk::fail("cannot read", path_);
    hasher.add(std::span(piece).first(static_cast<size_t>(got)));
    sum.bytes += static_cast<uint64_t>(got);
  }
  sum.hash = hasher.value();
  close();
  return sum;
}

std::optional<OpenFolder> OpenFolder::at(const Disk& disk, const std::string& path) {
  net::Fd fd(::open(path.c_str(), kFolder));
  if (!fd.valid()) return std::nullopt;
  return OpenFolder(disk, std::move(fd), path);
}

std::optional<OpenFolder> OpenFolder::open(const std::string& name) const {
  net::Fd fd(::openat(fd_.get(), name.c_str(), kFolder | O_NOFOLLOW));
  if (!fd.valid()) return std::nullopt;
  return OpenFolder(*disk_, std::move(fd), path_of(name));
}

OpenFolder::Kind OpenFolder::kind_of(const std::string& name) const {
  struct stat info {};
  if (::fstatat(fd_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) return Kind::kNothing;
  return S_ISDIR(info.st_mode) ? Kind::kFolder : S_ISLNK(info.st_mode) ? Kind::kLink : Kind::kOther;
}

std::optional<std::vector<std::string>> OpenFolder::names() const {
  // Opens the folder again, because a duplicate of fd_ would share its read position.
  net::Fd fd(::openat(fd_.get(), ".", kFolder));
  if (!fd.valid()) return std::nullopt;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd.get()), &::closedir);
  if (!stream) return std::nullopt;
  fd.release();
  std::vector<std::string> names;
  const int error = disk_->call("getdents", [&] {
    errno = 0;
    while (const dirent* entry = ::readdir(stream.get())) names.emplace_back(entry->d_name);
    return errno;
  });
  if (error != 0) return std::nullopt;
  std::erase_if(names, [](const std::string& name) { return name == "." || name == ".."; });
  return names;
}

bool OpenFolder::is_at_its_path() const { return leads(AT_FDCWD, path_, 0, fd_.get()); }

bool OpenFolder::leads_to(const std::string& name, int fd) const {
  return leads(fd_.get(), name, AT_SYMLINK_NOFOLLOW, fd);
}

bool OpenFolder::make_folder(const std::string& name) const {
  if (disk_->call("mkdirat", [&] { return ::mkdirat(fd_.get(), name.c_str(), 0777); }) == 0) {
    return true;
  }
  if (errno != EEXIST) Disk::fail("cannot create the folder", path_of(name));
  return false;
}

bool OpenFolder::rename(const std::string& from, const std::string& to) const {
  const int result = disk_->call(
      "renameat", [&] { return ::renameat(fd_.get(), from.c_str(), fd_.get(), to.c_str()); });
  if (result == 0) return true;
  if (errno != ENOENT) Disk::fail("cannot rename to", path_of(to));
  return false;
}

void OpenFolder::remove_folder(const std::string& name) const {
  const auto unlink = [this](const OpenFolder& folder, const std::string& file, int flags) {
    disk_->call("unlinkat", [&] { return ::unlinkat(folder.fd(), file.c_str(), flags); });
  };
  if (const auto folder = open(name)) {
    for (const std::string& file : folder->names().value_or(std::vector<std::string>())) {
      unlink(*folder, file, 0);
    }
    unlink(*this, name, AT_REMOVEDIR);
  } else if (kind_of(name) == Kind::kLink) {
    unlink(*this, name, 0);
  }
}

}  // namespace distrain::store
