#include "files/disk.h"

#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "files/file.h"

namespace distrain::data {

void Disk::fail(const char* what, const std::string& path) {
  throw base::Exception(base::ErrorKind::kResources,
                        std::string(what) + " " + path + ": " + errno_text());
}

bool Disk::make_folder(const std::string& path) const {
  if (call("mkdir", [&] { return ::mkdir(path.c_str(), 0777); }) == 0) return true;
  if (errno != EEXIST) fail("cannot make", path);
  return false;
}

bool Disk::rename(const std::string& from, const std::string& to) const {
  if (call("rename", [&] { return ::rename(from.c_str(), to.c_str()); }) == 0) return true;
  if (errno != ENOENT) fail("cannot rename to", to);
  return false;
}

void Disk::sync_folder(const std::string& path) const {
  const int fd =
      call("open", [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) fail("cannot open", path);
  if (call("fsync", [&] { return ::fsync(fd); }) != 0) {
    const int error = errno;
    ::close(fd);
    errno = error;
    fail("cannot write", path);
  }
  close(fd, path);
}

// Linux closes the file even when close() is interrupted: it must not be called again.
void Disk::close(int fd, const std::string& path) const {
  const int result = call("close", [&] {
    const int closed = ::close(fd);
    return closed != 0 && errno == EINTR ? 0 : closed;
  });
  if (result != 0) fail("cannot write", path);
}

/// A folder that is open; null, and errno, if it cannot be.
class Disk::Folder {
 public:
  Folder(const Disk& disk, const std::string& path, int flags) : disk_(disk) {
    const int fd = disk.call(
        "open", [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags); });
    if (fd < 0) return;
    stream_ = fdopendir(fd);
    if (stream_ == nullptr) ::close(fd);
  }
  ~Folder() {
    if (stream_ == nullptr) return;
    const int error = errno;
    if (disk_.probe_) disk_.probe_("close");
    closedir(stream_);
    errno = error;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  explicit operator bool() const { return stream_ != nullptr; }
  int fd() const { return dirfd(stream_); }
  std::optional<std::vector<std::string>> names() const {
    std::vector<std::string> names;
    if (disk_.probe_) disk_.probe_("getdents");
    errno = 0;
    while (const dirent* entry = readdir(stream_)) names.emplace_back(entry->d_name);
    if (errno != 0) return std::nullopt;
    std::erase_if(names, [](const std::string& name) { return name == "." || name == ".."; });
    return names;
  }

 private:
  const Disk& disk_;
  DIR* stream_ = nullptr;
};

std::optional<std::vector<std::string>> Disk::list(const std::string& path) const {
  const Folder folder(*this, path, 0);
  return folder ? folder.names() : std::nullopt;
}

// Whoever may write to the folder above could put a link in this one's place, even as we go. So its
// files are named relative to the folder that is open, which is none that a link leads to.
void Disk::remove_folder(const std::string& path) const {
  {
    const Folder folder(*this, path, O_NOFOLLOW);
    const auto names = folder ? folder.names() : std::nullopt;
    if (!names) {
      struct stat info {};
      if (::lstat(path.c_str(), &info) == 0 && S_ISLNK(info.st_mode)) {
        call("unlink", [&] { return ::unlink(path.c_str()); });
      }
      return;
    }
    for (const std::string& name : *names) {
      call("unlink", [&] { return ::unlinkat(folder.fd(), name.c_str(), 0); });
    }
  }
  call("rmdir", [&] { return ::rmdir(path.c_str()); });
}

OutputFile::OutputFile(const Disk& disk, const std::string& path)
    : disk_(disk), path_(path), fd_(disk.call("open", [&] {
        return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      })) {
  if (fd_ < 0) Disk::fail("cannot create", path_);
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
}

void OutputFile::write(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written =
        disk_.call("write", [&] { return ::write(fd_, bytes.data(), bytes.size()); });
    if (written < 0) Disk::fail("cannot write", path_);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void OutputFile::finish() {
  if (disk_.call("fsync", [&] { return ::fsync(fd_); }) != 0) Disk::fail("cannot write", path_);
  disk_.close(std::exchange(fd_, -1), path_);
}

}  // namespace distrain::data
