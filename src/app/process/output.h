#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace distrain::app {

/// Writes all of `text`, in one write(2) unless the kernel takes less. Gives back 0 or errno.
int write_all(int fd, std::string_view text);

/// "PROGRAM: `message`", a line on stderr; where nobody can hear it, nothing.
void say(std::string_view message);

/// What a failed write to stdout ends the process with: 141 when the reader went away, else 9,
/// which is said on stderr unless that is for somebody else to do.
int exit_code_of_write_error(int error, bool say_so = true);

/// Lines waiting for stdout, so that a slow reader stops the output but not the launcher, which
/// still has to take signals. The descriptor stays in blocking mode: it may be shared with a shell.
/// So into a pipe goes no more at once than it surely takes: a longer line in several writes, which
/// nothing can come between, since the launcher is the only one to write.
class OutputQueue {
 public:
  explicit OutputQueue(int fd);

  void push(std::string line) {
    bytes_ += line.size();
    lines_.push_back(std::move(line));
  }
  bool empty() const { return lines_.empty(); }
  /// Nothing more should be pushed before some of it is gone.
  bool full() const { return bytes_ > kMaxBytes; }
  int fd() const { return fd_; }

  /// Writes while the descriptor is writable. Gives back 0 or errno.
  int pump();

 private:
  static constexpr size_t kMaxBytes = 1 << 20;

  int fd_;
  size_t chunk_;        // bytes of one write
  size_t written_ = 0;  // of the first line
  size_t bytes_ = 0;
  std::deque<std::string> lines_;
};

}  // namespace distrain::app
