#include "output.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

namespace distrain::cmd {

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {  // someone else made the shared descriptor non-blocking
      pollfd item{fd, POLLOUT, 0};
      poll(&item, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

int exit_code_of_write_error(int error) { return error == EPIPE ? 141 : 9; }

int OutputQueue::pump() {
  while (!lines_.empty()) {
    pollfd item{fd_, POLLOUT, 0};
    if (poll(&item, 1, 0) <= 0) return 0;
    if (const int error = write_all(fd_, lines_.front())) return error;
    bytes_ -= lines_.front().size();
    lines_.pop_front();
  }
  return 0;
}

}  // namespace distrain::cmd
