#include "distrain/store/disk.h"

#include <cstring>

#include <fcntl.h>
#include <unistd.h>

#include "distrain/base/error.h"

namespace distrain::store {

void Disk::fail(const char* what, const std::string& path) {
  throw base::Exception(base::ErrorKind::kResources,
                        std::string(what) + " " + path + ": " + std::strerror(errno));
}

// O_EXCL prevents following a link.
OutputFile::OutputFile(const Disk& disk, int folder, const std::string& name, std::string path)
    : disk_(disk), path_(std::move(path)), fd_(disk.call("openat", [&] {
        return ::openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      })) {
  if (!fd_.valid()) Disk::fail("cannot create", path_);
}

void OutputFile::write(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written =
        disk_.call("write", [&] { return ::write(fd_.get(), bytes.data(), bytes.size()); });
    if (written < 0) Disk::fail("cannot write", path_);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void OutputFile::finish() {
  if (disk_.call("fsync", [&] { return ::fsync(fd_.get()); }) != 0) {
    Disk::fail("cannot write", path_);
  }
  const int fd = fd_.release();
  // Linux closes the file even if close() is interrupted, so close() must not be retried.
  const int result = disk_.call("close", [&] {
    const int closed = ::close(fd);
    return closed != 0 && errno == EINTR ? 0 : closed;
  });
  if (result != 0) Disk::fail("cannot write", path_);
}

}  // namespace distrain::store
