#include "distrain/store/file.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/store/open_folder.h"

namespace distrain::store {
namespace {

net::Fd open_in(const OpenFolder& folder, const std::string& name) {
  net::Fd fd(::openat(folder.fd(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  if (fd.valid()) return fd;
  if (errno == ELOOP) base::bad_data(folder.path_of(name) + kNotFollowed);
  fail_open(folder.path_of(name));
}

}  // namespace

void fail_open(const std::string& path) {
  base::bad_data("cannot open " + path + ": " + std::strerror(errno));
}

// O_NONBLOCK, because opening a pipe without a writer would block for ever.
InputFile::InputFile(const std::string& path, Kind kind)
    : InputFile(net::Fd(::open(path.c_str(),
                               O_RDONLY | O_CLOEXEC | (kind == Kind::kRegular ? O_NONBLOCK : 0))),
                path, kind) {}

InputFile::InputFile(const OpenFolder& folder, const std::string& name)
    : InputFile(open_in(folder, name), folder.path_of(name), Kind::kRegular) {}

InputFile::InputFile(net::Fd fd, std::string path, Kind kind)
    : path_(std::move(path)), fd_(std::move(fd)) {
  if (!fd_.valid()) fail_open(path_);
  struct stat status {};
  const bool regular = fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode);
  if (regular) size_ = static_cast<uint64_t>(status.st_size);
  if (!regular && kind == Kind::kRegular) base::bad_data(path_ + ": not a regular file");
}

size_t InputFile::read(void* out, size_t bytes) const {
  size_t done = 0;
  while (done < bytes) {
    const size_t got = read_some(static_cast<uint8_t*>(out) + done, bytes - done);
    if (got == 0) break;
    done += got;
  }
  return done;
}

size_t InputFile::read_some(void* out, size_t bytes) const {
  for (;;) {
    const ssize_t got = ::read(fd_.get(), out, bytes);
    if (got >= 0) return static_cast<size_t>(got);
    if (errno != EINTR) base::bad_data("cannot read " + path_ + ": " + std::strerror(errno));
  }
}

}  // namespace distrain::store
