#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

#include "distrain/base/clock.h"

namespace distrain::app {

/// Writes all of `text`, in one write(2) unless the kernel takes less. Gives back 0 or errno.
int write_all(int fd, std::string_view text);

/// Returns true if a write to `fd` does not wait: the kernel takes some bytes, or the write fails.
bool is_writable(int fd);

/// "PROGRAM: `message`", a line on stderr; where nobody can hear it, nothing.
void say(std::string_view message);

/// What a failed write to stdout ends the process with: 141 when the reader went away, else 9,
/// which is said on stderr unless that is for somebody else to do.
int exit_code_of_write_error(int error, bool say_so = true);

/// How long who ends by a signal waits for a reader that takes nothing.
inline constexpr auto kReaderGrace = std::chrono::seconds(2);

/// Lines waiting for their reader, so that a slow one stops the output but not who writes, who
/// still has to take signals. The descriptor stays in blocking mode: it may be shared with a shell.
/// So a pipe gets no more at once than it surely takes: a long line in several writes.
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
  /// When who ends by a signal, and waits since `since`, waits for the reader no more.
  base::TimePoint given_up_at(base::TimePoint since) const {
    return std::max(since, taken_at_) + kReaderGrace;
  }
  int fd() const { return fd_; }

  /// Writes while the descriptor is writable. Gives back 0 or errno.
  int pump();
  /// What waits is lost.
  void clear();

 private:
  static constexpr size_t kMaxBytes = 1 << 20;

  int fd_;
  size_t pipe_ = 0;     // bytes that it holds; 0: no pipe
  size_t written_ = 0;  // of the first line
  size_t bytes_ = 0;
  base::TimePoint taken_at_{};  // the reader took some
  std::deque<std::string> lines_;
};

}  // namespace distrain::app
