#include "process/output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace distrain::app {

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {  // another process made the shared descriptor non-blocking
      pollfd item{fd, POLLOUT, 0};
      poll(&item, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

bool is_writable(int fd) {
  pollfd item{fd, POLLOUT, 0};
  return poll(&item, 1, 0) > 0;
}

void say(std::string_view message) {
  std::string line = program_invocation_short_name;
  line.append(": ").append(message).push_back('\n');
  write_all(STDERR_FILENO, line);
}

int exit_code_of_write_error(int error, bool say_so) {
  if (error == EPIPE) return 141;
  if (say_so) say(std::string("stdout: ") + strerror(error));
  return 9;
}

OutputQueue::OutputQueue(int fd) : fd_(fd) {
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISFIFO(info.st_mode)) return;
  pipe_ = static_cast<size_t>(std::max(fcntl(fd, F_GETPIPE_SZ), PIPE_BUF));
}

void OutputQueue::clear() {
  lines_.clear();
  bytes_ = written_ = 0;
}

int OutputQueue::pump() {
  while (!lines_.empty() && is_writable(fd_)) {
    // A writable pipe takes PIPE_BUF bytes without blocking, and an empty pipe its capacity.
    int waiting = 0;
    const bool is_empty = ioctl(fd_, FIONREAD, &waiting) == 0 && waiting == 0;
    const size_t at_once = pipe_ == 0 ? std::string::npos : is_empty ? pipe_ : PIPE_BUF;
    const auto next = std::string_view(lines_.front()).substr(written_, at_once);
    const ssize_t taken = write(fd_, next.data(), next.size());
    if (taken < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
    written_ += static_cast<size_t>(taken);
    taken_at_ = base::Clock::now();
    if (written_ < lines_.front().size()) continue;
    bytes_ -= written_;
    written_ = 0;
    lines_.pop_front();
  }
  return 0;
}

}  // namespace distrain::app
