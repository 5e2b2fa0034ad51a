#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

#include "distrain/base/clock.h"

namespace distrain::app {

/// Writes all of `text`, in one write(2) if the kernel accepts it. May block. Returns 0 or errno.
int write_all(int fd, std::string_view text);

/// Returns true if a write to `fd` would accept some bytes or fail at once.
bool is_writable(int fd);

/// Prints the line "PROGRAM: `message`" to stderr. Ignores errors.
void say(std::string_view message);

/// Returns the exit code after a write to stdout failed with errno `error`: 141 if the reader has
/// closed the pipe, otherwise 9. If `say_so`, reports errors other than a closed pipe on stderr.
int exit_code_of_write_error(int error, bool say_so = true);

/// How long a process that a signal ends waits for a reader that reads nothing.
inline constexpr auto kReaderGrace = std::chrono::seconds(2);

/// Queues lines, so that a slow reader does not block the writing thread, which also handles
/// signals. The descriptor stays in blocking mode, because it may be shared with a shell. So writes
/// to a pipe are no larger than what the pipe accepts without blocking.
class OutputQueue {
 public:
  explicit OutputQueue(int fd);

  void push(std::string line) {
    bytes_ += line.size();
    lines_.push_back(std::move(line));
  }
  bool empty() const { return lines_.empty(); }
  /// Returns true if the queue is above its limit: push nothing before pump() has written some.
  bool full() const { return bytes_ > kMaxBytes; }
  /// Returns when to give up the reader: kReaderGrace after `since` or the last write.
  base::TimePoint given_up_at(base::TimePoint since) const {
    return std::max(since, taken_at_) + kReaderGrace;
  }
  int fd() const { return fd_; }

  /// Writes lines while the descriptor is writable. Returns 0 or errno.
  int pump();
  void clear();

 private:
  static constexpr size_t kMaxBytes = 1 << 20;

  int fd_;
  size_t pipe_ = 0;     // the pipe's capacity in bytes; 0: not a pipe
  size_t written_ = 0;  // bytes of the first line
  size_t bytes_ = 0;
  base::TimePoint taken_at_{};  // the last successful write
  std::deque<std::string> lines_;
};

}  // namespace distrain::app
