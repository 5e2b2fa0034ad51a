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

/// The end of a pipe that another process writes lines to, of any length.
class LinePipe {
 public:
  /// Gives back the end to write to. Throws `resources`.
  net::Fd open();
  /// -1 once all has been read.
  int fd() const { return fd_.get(); }
  /// Calls `take` with each complete line that is there, newline included. Never blocks, and leaves
  /// the rest for the next time after a while, so that a rank that never stops talking cannot keep
  /// the launcher from its signals; what a dead rank left is well within what is read at once.
  void read(const std::function<void(std::string)>& take);
  /// What came after the last newline. Nothing comes any more.
  std::string close();

 private:
  net::Fd fd_;
  std::string pending_;
};

/// A rank that the launcher forked: its process, its two pipes and what it said.
class Child {
 public:
  struct Handlers {
    std::function<void(const Json&, std::string)> on_event;  ///< and its line, with the newline
    std::function<void(std::string)> on_text;                ///< a line for stderr
  };

  /// Makes the pipes. Throws `resources`.
  Child(int rank, std::string role, const Handlers& handlers);

  /// Forks: `body` runs in the child and gives its exit code. Throws `resources`.
  void start(const std::function<int()>& body);

  /// Takes what is in the pipes. Never blocks. Without `lines` the JSON lines stay where they are,
  /// which stops the rank once its pipe is full.
  void read_pipes(bool lines);

  /// Notes that the process has ended, and takes the rest of its words, was stopped, or goes on.
  bool reap();

  /// To the process group. A rank that ends afterwards is no cause, unless it has said so before.
  void send(int signal);
  /// Stops the whole process group, or has it go on.
  void stop(bool stopped);
  /// To the rank alone, one that does not end it: what it has started itself may know none.
  void tell(int signal);

  int rank() const { return rank_; }
  const std::string& role() const { return role_; }
  /// Where the rank writes its JSON lines, until it is started.
  int lines_fd() const { return lines_end_.get(); }
  int out_fd() const { return out_.fd(); }
  int err_fd() const { return err_.fd(); }
  bool alive() const { return pid_ > 0 && !status_; }
  /// By SIGSTOP, say, as long as it is.
  std::optional<base::TimePoint> stopped_since() const { return stopped_since_; }
  bool failed() const { return status_ && exit_code() != 0; }
  bool ended_by_us() const { return ended_by_us_; }
  /// By send(), though it may not have ended yet.
  bool killed() const { return killed_; }
  /// 128 + n by signal; 1 for a rank that left with 0 but without its last line.
  int exit_code() const;
  /// The job goes on without it: it has said so, or takes the place of one that had.
  bool may_be_lost() const { return may_be_lost_ || is_successor_; }
  bool is_successor() const { return is_successor_; }
  void set_successor() { is_successor_ = true; }
  /// It is about to be killed, as it was stopped for so long that the job has gone on without it.
  bool is_given_up() const { return is_given_up_; }
  void give_up() { is_given_up_ = true; }
  /// Returns true if a save has got further since the last call.
  bool take_saving() { return std::exchange(is_saving_, false); }
  /// It has found all others.
  bool ready() const { return ready_; }
  /// As its lines have it; empty: not yet.
  const std::string& run_id() const { return run_id_; }
  /// The signal that it took and ended by in good order, as its last line tells; 0 if none.
  int stopped_by() const;
  /// The signal that killed it, 0 if none.
  int signal() const;
  base::TimePoint ended_at() const { return ended_at_; }
  double rss_mb() const { return rss_mb_; }
  /// Its lines `rank_end` and `error`, empty where there is none. The latter is held back: other
  /// ranks fail for the same reason, and one error is to be told once.
  const Json& rank_end() const { return rank_end_; }
  const Json& error() const { return error_; }
  /// Pairs of a rank and its fields, if this is rank 0: kFigures.
  const Json& figures() const { return figures_; }
  const std::vector<std::string>& stderr_tail() const { return tail_; }

 private:
  void take_line(std::string line);
  void take_text(std::string line);

  int rank_;
  std::string role_;
  const Handlers* handlers_;
  pid_t pid_ = -1;
  LinePipe out_, err_;
  net::Fd lines_end_, text_end_;  // the rank's
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
  std::string run_id_;
};

}  // namespace distrain::app
