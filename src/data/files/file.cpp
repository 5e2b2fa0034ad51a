#include "files/file.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace distrain::data {
namespace {

[[noreturn]] void fail(std::string message) {
  throw base::Exception(base::ErrorKind::kBadData, std::move(message));
}

}  // namespace

std::string errno_text() {
  std::array<char, 128> buffer{};
  return strerror_r(errno, buffer.data(), buffer.size());
}

InputFile::InputFile(const std::string& path, Kind kind)
    : path_(path),
      // Opening a pipe that nobody writes to would wait for ever.
      fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | (kind == Kind::kRegular ? O_NONBLOCK : 0))) {
  if (fd_ < 0) fail("cannot open " + path_ + ": " + errno_text());
  struct stat status {};
  const bool regular = fstat(fd_, &status) == 0 && S_ISREG(status.st_mode);
  if (regular) size_ = static_cast<uint64_t>(status.st_size);
  if (!regular && kind == Kind::kRegular) {
    close(fd_);
    fail(path_ + ": not a regular file");
  }
}

InputFile::~InputFile() { close(fd_); }

size_t InputFile::read(void* out, size_t bytes) {
  for (;;) {
    const ssize_t got = ::read(fd_, out, bytes);
    if (got >= 0) return static_cast<size_t>(got);
    if (errno != EINTR) fail("cannot read " + path_ + ": " + errno_text());
  }
}

}  // namespace distrain::data
