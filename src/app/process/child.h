#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "distrain/base/clock.h"
#include "distrain/job/job.h"
#include "distrain/net/socket.h"

namespace distrain::app {

using job::Json;

/// The read end of a pipe that another process writes lines of any length to.
class LinePipe {
 public:
  /// Creates the pipe and returns its write end. Throws `resources` if no pipe can be created.
  net::Fd open();
  int fd() const { return fd_.get(); }  ///< the read end; -1 after the end of the stream
  /// Calls `take` with each complete line, newline included. Never blocks. Reads at most 4 MiB, so
  /// that a rank that writes all the time does not delay the launcher's signal handling. A pipe
  /// holds less.
  void read(const std::function<void(std::string)>& take);
  /// Closes the pipe and returns the incomplete line after the last newline.
  std::string close();

 private:
  net::Fd fd_;
  std::string pending_;
};

/// A rank that the launcher forked: its process, its two pipes and the state that it reported.
class Child {
 public:
  struct Handlers {
    std::function<void(const Json&, std::string)> on_event;  ///< an event and its line, with \n
    std::function<void(std::string)> on_text;                ///< a line for stderr
  };

  /// Creates the pipes. Throws `resources` if no pipe can be created.
  Child(int rank, std::string role, const Handlers& handlers);

  /// Forks a process that exits with the result of `body`. Throws `resources` if fork() fails.
  void start(const std::function<int()>& body);

  /// Reads the pipes without blocking. If `lines` is false, JSON lines stay in their pipe, so the
  /// rank blocks once the pipe is full.
  void read_pipes(bool lines);

  /// Returns true if the process has just ended, after reading its remaining output.
  bool reap();
  /// Signals the process group. Its end is then ended_by_us(), unless it has reported an error.
  void send(int signal);
  /// Stops the process group, or lets it continue if `stopped` is false.
  void stop(bool stopped);
  /// Sends a signal that does not end the rank. The rank's process group does not get the signal,
  /// because it could end processes that the rank has started.
  void tell(int signal);

  int rank() const { return rank_; }
  const std::string& role() const { return role_; }
  /// Returns the descriptor that the rank writes JSON lines to; call it before start().
  int lines_fd() const { return lines_end_.get(); }
  int out_fd() const { return out_.fd(); }
  int err_fd() const { return err_.fd(); }
  bool alive() const { return pid_ > 0 && !status_; }
  /// Returns when a signal such as SIGSTOP stopped the rank; null if the rank is not stopped.
  std::optional<base::TimePoint> stopped_since() const { return stopped_since_; }
  bool failed() const { return status_ && exit_code() != 0; }
  bool ended_by_us() const { return ended_by_us_; }
  bool killed() const { return killed_; }  ///< by send(SIGKILL), even if it has not ended yet
  /// Returns 128 + n if signal n killed the rank, and 1 if it exited with 0 without a last line.
  int exit_code() const;
  /// Returns true if the job continues when this rank is lost. The rank, or the process that it
  /// replaced, has reported that.
  bool may_be_lost() const { return may_be_lost_ || is_successor_; }
  bool is_successor() const { return is_successor_; }
  void set_successor() { is_successor_ = true; }
  /// Returns true if the rank is killed because it was stopped too long: a tolerated loss.
  bool is_given_up() const { return is_given_up_; }
  void give_up() { is_given_up_ = true; }
  /// Returns true if a save has made progress since the last call.
  bool take_saving() { return std::exchange(is_saving_, false); }
  bool ready() const { return ready_; }                  ///< it has joined all other ranks
  const std::string& run_id() const { return run_id_; }  ///< empty until a line has it
  /// Returns the signal after which the rank ended in good order, from its last line; 0 if none.
  int stopped_by() const;
  int signal() const;  ///< that killed the process; 0 if none
  base::TimePoint ended_at() const { return ended_at_; }
  double rss_mb() const { return rss_mb_; }
  /// Return the rank's `rank_end` and `error` lines; empty if there is none. Errors are not printed
  /// as they arrive, because several ranks may fail for the same reason.
  const Json& rank_end() const { return rank_end_; }
  const Json& error() const { return error_; }
  /// Returns rank 0's kFigures line: pairs of a rank and its fields. Empty on other ranks.
  const Json& figures() const { return figures_; }
  const std::vector<std::string>& stderr_tail() const { return tail_; }

 private:
  void take_line(std::string line);
  void take_text(std::string line);

  int rank_;
  std::string role_, run_id_;
  const Handlers* handlers_;
  pid_t pid_ = -1;
  LinePipe out_, err_;
  net::Fd lines_end_, text_end_;  // the rank's ends of the pipes, until start()
  std::vector<std::string> tail_;
  Json rank_end_ = Json::object();
  Json error_ = Json::object();
  Json figures_ = Json::array();
  std::optional<int> status_;
  std::optional<base::TimePoint> stopped_since_;
  base::TimePoint ended_at_;
  double rss_mb_ = 0;
  bool ended_by_us_ = false;
  bool killed_ = false;
  bool ready_ = false;
  bool may_be_lost_ = false;
  bool is_successor_ = false;
  bool is_given_up_ = false;
  bool is_saving_ = false;
};

}  // namespace distrain::app
