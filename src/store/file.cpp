#include "distrain/store/file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "distrain/store/disk.h"

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

// Uses O_NONBLOCK for kRegular, because open() would otherwise block on a pipe without a writer.
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

void InputFile::read_at(uint64_t offset, std::span<uint8_t> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) base::bad_data("cannot read " + path_ + ": " + std::strerror(errno));
    if (got == 0) base::bad_data(path_ + ": cut short while it is read");
    out = out.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
}

GzipReader::GzipReader(const std::string& path, Limit limit, InputFile::Kind kind)
    : file_(path, kind),
      limit_(std::move(limit)),
      left_(limit_.bytes),
      stream_(std::make_unique<z_stream_s>()) {
  stream_->next_in = input_.data();
  stream_->avail_in = static_cast<uInt>(file_.read(input_.data(), 2));
  gzip_ = stream_->avail_in == 2 && input_[0] == 0x1F && input_[1] == 0x8B;
  constexpr int kGzipOnly = 16 + MAX_WBITS;
  if (gzip_ && inflateInit2(stream_.get(), kGzipOnly) != Z_OK) throw std::bad_alloc();
}

GzipReader::~GzipReader() {
  if (gzip_) inflateEnd(stream_.get());
}

void GzipReader::limit(Limit limit) {
  limit_ = std::move(limit);
  left_ = limit_.bytes;
}

size_t GzipReader::read(uint8_t* out, size_t bytes) {
  const size_t allowed = std::min<uint64_t>(bytes, left_);
  const size_t done = read_some(out, allowed);
  left_ -= done;
  uint8_t more;
  if (done == allowed && allowed < bytes && read_some(&more, 1) > 0) {
    base::bad_data(file_.path() + ": longer than the " + std::to_string(limit_.bytes) + " bytes " +
                   limit_.whose);
  }
  return done;
}

size_t GzipReader::read_some(uint8_t* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    if (stream_->avail_in == 0) {
      stream_->next_in = input_.data();
      stream_->avail_in = static_cast<uInt>(file_.read_some(input_.data(), input_.size()));
    }
    if (stream_->avail_in == 0) {
      if (gzip_ && !between_members_) base::bad_data(file_.path() + ": the gzip file is cut short");
      break;
    }
    done += inflate_some(out + done, bytes - done);
  }
  return done;
}

size_t GzipReader::inflate_some(uint8_t* out, size_t bytes) {
  const auto room = static_cast<uInt>(std::min<size_t>(bytes, 1 << 30));
  if (!gzip_) {
    const uInt count = std::min(room, stream_->avail_in);
    std::memcpy(out, stream_->next_in, count);
    stream_->next_in += count;
    stream_->avail_in -= count;
    return count;
  }
  if (between_members_) {
    inflateReset(stream_.get());
    between_members_ = false;
  }
  stream_->next_out = out;
  stream_->avail_out = room;
  const int result = inflate(stream_.get(), Z_NO_FLUSH);
  if (result == Z_MEM_ERROR) throw std::bad_alloc();
  if (result == Z_STREAM_END) {
    between_members_ = true;
  } else if (result != Z_OK && result != Z_BUF_ERROR) {
    base::bad_data(file_.path() + ": the gzip file is damaged");
  }
  return room - stream_->avail_out;
}

}  // namespace distrain::store
