#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "distrain/job/job.h"

namespace distrain::app {

using job::Json;

/// Cuts a stream into lines of any length.
class LineSplitter {
 public:
  /// Calls `take` with each complete line, newline included.
  void feed(std::string_view bytes, const std::function<void(std::string)>& take);
  /// What came after the last newline.
  std::string rest() { return std::move(pending_); }

 private:
  std::string pending_;
};

/// A rank that the launcher forked: its process, its two pipes and what it said.
class Child {
 public:
  struct Handlers {
    std::function<void(std::string)> on_line;  ///< a JSON line, newline included
    std::function<void(std::string)> on_text;  ///< a line for stderr
  };

  Child(int rank, std::string role) : rank_(rank), role_(std::move(role)) {}

  /// Runs in the child; gives its exit code.
  using Body = std::function<int()>;

  /// Forks. What the child is to run is made before, as a child of a process with threads should
  /// not allocate. `inherited` are descriptors of the launcher that this child must not keep.
  /// Throws `resources`.
  void start(const std::function<Body(int out_fd)>& make_body, const std::vector<int>& inherited);

  /// Takes what is in the pipes. Never blocks.
  void read_pipes(const Handlers& handlers);
  /// As read_pipes, but leaves the JSON lines, which stops the rank once its pipe is full.
  void read_stderr(const Handlers& handlers);

  /// Notes the end of the process, if it has ended, and takes the rest of its words.
  bool reap(const Handlers& handlers);

  /// To the whole process group. A rank that ends afterwards is no cause of anything, unless it has
  /// said before what went wrong.
  void send(int signal);
  /// One that does not end it.
  void tell(int signal);

  int rank() const { return rank_; }
  const std::string& role() const { return role_; }
  int out_fd() const { return out_fd_; }
  int err_fd() const { return err_fd_; }
  bool alive() const { return pid_ > 0 && !status_; }
  bool failed() const { return status_ && exit_code() != 0; }
  bool ended_by_us() const { return ended_by_us_; }
  /// 128 + n by signal; 1 for a rank that left with 0 but without its last line.
  int exit_code() const;
  /// Has found all others.
  bool ready() const { return ready_; }
  /// Without its last line.
  bool left_early() const { return status_ && !rank_end_; }
  /// The signal that it took and ended by in good order, as its last line tells; 0 if none.
  int stopped_by() const;
  /// The signal that killed it, 0 if none.
  int signal() const;
  std::chrono::steady_clock::time_point ended_at() const { return ended_at_; }
  double rss_mb() const { return rss_mb_; }
  const std::optional<Json>& rank_end() const { return rank_end_; }
  const std::optional<Json>& error() const { return error_; }
  /// Held back: other ranks fail for the same reason, and one error is to be told once.
  const std::string& error_line() const { return error_line_; }
  const std::deque<std::string>& stderr_tail() const { return tail_; }

 private:
  void read_stdout(const Handlers& handlers);
  void take_line(std::string line, const Handlers& handlers);
  void take_text(std::string line, const Handlers& handlers);

  const int rank_;
  std::string role_;
  pid_t pid_ = -1;
  int out_fd_ = -1;
  int err_fd_ = -1;
  LineSplitter out_;
  LineSplitter err_;
  std::deque<std::string> tail_;
  std::optional<Json> rank_end_;
  std::optional<Json> error_;
  std::string error_line_;
  std::optional<int> status_;
  std::chrono::steady_clock::time_point ended_at_;
  double rss_mb_ = 0;
  bool ended_by_us_ = false;
  bool ready_ = false;
};

}  // namespace distrain::app
