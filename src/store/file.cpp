#include "distrain/store/file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
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

// Reads `bytes` bytes, or fewer if the file ends before, and returns their number.
size_t read_all_of(auto& file, void* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const size_t got = file.read_some(static_cast<uint8_t*>(out) + done, bytes - done);
    if (got == 0) break;
    done += got;
  }
  return done;
}

}  // namespace

void fail_open(const std::string& path) {
  base::bad_data("cannot open " + path + ": " + std::strerror(errno));
}

Interrupt::Interrupt() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_.valid()) return;
  throw base::Exception(base::ErrorKind::kResources,
                        std::string("cannot create an eventfd: ") + std::strerror(errno));
}

void Interrupt::set() {
  set_.store(true, std::memory_order_relaxed);
  eventfd_write(event_.get(), 1);
}

// Uses O_NONBLOCK for kRegular, because open() would otherwise block on a pipe without a writer.
InputFile::InputFile(const std::string& path, Kind kind)
    : InputFile(net::Fd(::open(path.c_str(),
                               O_RDONLY | O_CLOEXEC | (kind == Kind::kRegular ? O_NONBLOCK : 0))),
                path, kind) {}

InputFile::InputFile(const OpenFolder& folder, const std::string& name)
    : InputFile(open_in(folder, name), folder.path_of(name), Kind::kRegular) {}

InputFile::InputFile(const std::string& path, Waiting waiting)
    : InputFile(net::Fd(path == "-" ? ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0)
                                    : ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)),
                path == "-" ? "standard input" : path, Kind::kAny) {
  waiting_ = waiting;
  struct stat status {};
  awaits_writer_ = path != "-" && fstat(fd_.get(), &status) == 0 && S_ISFIFO(status.st_mode);
}

InputFile::InputFile(net::Fd fd, std::string path, Kind kind)
    : path_(std::move(path)), fd_(std::move(fd)) {
  if (!fd_.valid()) fail_open(path_);
  struct stat status {};
  regular_ = fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode);
  if (regular_) size_ = static_cast<uint64_t>(status.st_size);
  if (!regular_ && kind == Kind::kRegular) base::bad_data(path_ + ": not a regular file");
}

size_t InputFile::read(void* out, size_t bytes) const { return read_all_of(*this, out, bytes); }

size_t InputFile::read_some(void* out, size_t bytes) const {
  for (;;) {
    const bool limit_passed = waiting_ && !wait_for_bytes();
    const ssize_t got = ::read(fd_.get(), out, bytes);
    if (got == 0 && limit_passed) base::bad_data(path_ + ": no process writes to this pipe");
    if (got >= 0 || errno == EAGAIN) awaits_writer_ = false;
    if (got >= 0) return static_cast<size_t>(got);
    if (errno == EINTR || (waiting_ && errno == EAGAIN)) continue;
    base::bad_data("cannot read " + path_ + ": " + std::strerror(errno));
  }
}

// Waits until a pipe has bytes or has lost its last writer. Returns false if neither has happened
// within the limit for the first writer. Then read() tells whether there is a writer: it returns 0
// if there is none, and fails with EAGAIN if there is one that has not written yet.
bool InputFile::wait_for_bytes() const {
  int ready = 1;
  if (!regular_) {
    pollfd items[] = {{waiting_->interrupt->fd(), POLLIN, 0}, {fd_.get(), POLLIN, 0}};
    const auto limit = awaits_writer_ ? waiting_->writer_limit.count() : int64_t{-1};
    do {
      ready = ::poll(items, std::size(items), static_cast<int>(limit));
    } while (ready < 0 && errno == EINTR);
  }
  if (!waiting_->interrupt->is_set()) return ready != 0;
  throw base::Exception(base::ErrorKind::kCancelled, path_ + ": the reading was stopped");
}

void InputFile::seek(uint64_t offset) const {
  if (::lseek(fd_.get(), static_cast<off_t>(offset), SEEK_SET) >= 0) return;
  base::bad_data("cannot seek in " + path_ + ": " + std::strerror(errno));
}

uint64_t InputFile::current_size() const {
  struct stat status {};
  if (!regular_ || fstat(fd_.get(), &status) != 0) return 0;
  return static_cast<uint64_t>(status.st_size);
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

GzipReader::GzipReader(InputFile file, ReadLimit limit)
    : file_(std::move(file)),
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

size_t GzipReader::read(void* out, size_t bytes) {
  const size_t allowed = std::min<uint64_t>(bytes, left_);
  const size_t done = read_all_of(*this, out, allowed);
  left_ -= done;
  uint8_t more;
  if (done == allowed && allowed < bytes && read_some(&more, 1) > 0) {
    base::bad_data(file_.path() + ": longer than the " + std::to_string(limit_.bytes) + " bytes " +
                   limit_.whose);
  }
  return done;
}

size_t GzipReader::read_some(void* out, size_t bytes) {
  size_t done = 0;
  while (done == 0 && bytes > 0) {
    if (stream_->avail_in == 0) {
      if (!gzip_ && bytes >= input_.size()) return file_.read_some(out, bytes);
      stream_->next_in = input_.data();
      stream_->avail_in = static_cast<uInt>(file_.read_some(input_.data(), input_.size()));
    }
    if (stream_->avail_in == 0) {
      if (gzip_ && !between_members_) base::bad_data(file_.path() + ": the gzip file is cut short");
      break;
    }
    done = inflate_some(static_cast<uint8_t*>(out), bytes);
  }
  return done;
}

void GzipReader::seek(uint64_t offset) {
  file_.seek(offset);
  stream_->avail_in = 0;
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
