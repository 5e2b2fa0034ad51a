#pragma once

#include <algorithm>

#include <poll.h>

#include "distrain/net/socket.h"
#include "process/launcher.h"
#include "process/output.h"

namespace distrain::app {

/// The read end of a pipe that another process writes lines of any length to.
class LinePipe {
 public:
  /// Creates the pipe and returns its write end. Throws `resources` if no pipe can be created.
  net::Fd open();
  int fd() const { return fd_.get(); }  ///< the read end; -1 after the end of the stream
  /// Calls `take` with each complete line, newline included. Never blocks. Reads at most 4 MiB, so
  /// that a rank that writes without pause does not delay the handling of signals.
  void read(const std::function<void(std::string)>& take);
  /// Closes the pipe and returns the incomplete line after the last newline.
  std::string close() {
    fd_.reset();
    return std::exchange(pending_, {});
  }

 private:
  net::Fd fd_;
  std::string pending_;
};

/// A rank that the launcher forked: its process, its two pipes and the state that it reported.
class Child {
 public:
  struct Handlers {
    std::function<void(const Json&, std::string)> on_event;  ///< gets an event and its JSON line
    std::function<void(std::string)> on_text;                ///< gets a line of the rank's stderr
  };

  /// Creates the pipes. Throws `resources` if no pipe can be created.
  Child(int number, std::string name, const Handlers& handlers)
      : rank(number),
        role(std::move(name)),
        handlers_(&handlers),
        lines_end_(out_.open()),
        text_end_(err_.open()) {}

  /// Forks a process that exits with the result of `body`. Throws `resources` if fork() fails.
  void start(const std::function<int()>& body);
  /// Reads the pipes without blocking. Skips the pipe of JSON lines unless `lines`.
  void read_pipes(bool lines) {
    if (lines) out_.read([this](std::string line) { take_line(std::move(line)); });
    err_.read([this](std::string line) { take_text(std::move(line)); });
  }
  /// Returns true if the process has just ended, after reading its remaining output.
  bool reap();
  /// Sends `signal` to the process group. Sets `ended_by_us` unless the rank has reported an error.
  void send(int signal) {
    if (!alive()) return;
    ended_by_us = ended_by_us || error.empty();
    killed = killed || signal == SIGKILL;
    kill(-pid_, signal);
  }
  /// Stops the process group, or lets it continue if `stopped` is false.
  void stop(bool stopped) {
    if (alive()) ::kill(-pid_, stopped ? SIGSTOP : SIGCONT);
  }
  /// Sends a signal that does not end the rank. The rank's process group does not get the signal,
  /// because the signal could end processes that the rank has started.
  void tell(int signal) {
    if (alive()) ::kill(pid_, signal);
  }

  /// Returns the descriptor that the rank writes JSON lines to; call it before start().
  int lines_fd() const { return lines_end_.get(); }
  int out_fd() const { return out_.fd(); }
  int err_fd() const { return err_.fd(); }
  bool alive() const { return pid_ > 0 && !status_; }
  bool failed() const { return status_ && exit_code() != 0; }
  /// Returns 128 + n if signal n killed the rank; 1, not 0, if it wrote no `rank_end`.
  int exit_code() const;
  /// Returns true if the rank has reported, in any process, that the job can continue without it.
  bool may_be_lost() const { return may_be_lost_ || is_successor; }
  /// Returns true if a save has made progress since the last call.
  bool take_saving() { return std::exchange(is_saving_, false); }
  /// Returns the signal on which the rank ended in good order and wrote `rank_end`; 0 if none.
  int stopped_by() const {
    if (!status_ || signal() || !error.empty() || !rank_end.contains("signal")) return 0;
    return rank_end["signal"].is_string() && exit_code() > 128 ? exit_code() - 128 : 0;
  }
  int signal() const;  ///< the signal that killed the process; 0 if none

  // RankGroup sets these two members.
  bool is_successor = false;  ///< this process replaces a lost process of the rank
  bool is_given_up = false;   ///< killed because it was stopped (SIGSTOP) too long; the job goes on

  // The functions above set these members.
  int rank;
  std::string role;
  std::string run_id;  ///< empty until one of the rank's lines has it
  bool ready = false;  ///< the rank has joined all other ranks
  bool ended_by_us = false;
  bool killed = false;                           ///< send() sent SIGKILL; may still be alive
  std::optional<base::TimePoint> stopped_since;  ///< when a signal stopped it; null if it runs
  base::TimePoint ended_at;
  double rss_mb = 0;
  /// The rank's `rank_end` and `error` lines; empty if there is none. Errors are not printed as
  /// they arrive, because several ranks may fail for the same reason.
  Json rank_end = Json::object(), error = Json::object();
  Json figures = Json::array();  ///< rank 0's kFigures line: pairs of a rank and its fields
  std::vector<std::string> stderr_tail;

 private:
  void take_line(std::string line);
  void take_text(std::string line) {
    constexpr size_t kTailLines = 20;
    stderr_tail.push_back(line.substr(0, line.size() - 1));
    if (stderr_tail.size() > kTailLines) stderr_tail.erase(stderr_tail.begin());
    handlers_->on_text(std::move(line));
  }

  const Handlers* handlers_;
  pid_t pid_ = -1;
  LinePipe out_, err_;
  net::Fd lines_end_, text_end_;  // the rank's ends of the pipes, open until start()
  std::optional<int> status_;
  bool may_be_lost_ = false, is_saving_ = false;
};

/// Returns true for signals of a program error, such as SIGSEGV.
bool is_crash(int signal);

/// The reason why one run of the job failed; a restart begins another run.
struct Verdict {
  Cause cause;
  bool by_signal = false;  ///< a signal to the launcher or a rank ended the job
  Json error;              ///< a rank's `error` line; null if no rank reported one
};

/// The ranks that this launcher runs for one start of the job, from fork to exit.
///
/// After the first failure, the other ranks have a grace period to end by themselves, because they
/// notice the failure within the peer timeout. Then they get SIGTERM, then SIGKILL. The grace
/// period is short if not all ranks have joined yet. The root cause is the first failure,
/// preferably one that is neither a lost peer nor blamed on another rank.
/// The loss of a rank that the job can continue without counts only if other ranks blame it.
class RankGroup {
 public:
  /// `in_child` is called in each forked process to close the launcher's descriptors.
  RankGroup(const LaunchPlan& plan, const Child::Handlers& handlers,
            std::function<void(int rank)> in_child)
      : plan_(plan), handlers_(handlers), in_child_(std::move(in_child)) {}

  /// Starts the ranks. If one cannot be started, kills the others; verdict() returns the error.
  void start(const SpawnedRank& told);
  /// Starts a lost rank again while the job runs. Returns false if it cannot be started now.
  bool start_again(const SpawnedRank& told, int rank);

  bool any_alive() const { return std::ranges::any_of(children_, &Child::alive); }
  /// Returns true if all ranks of the job have joined: before that, no rank is `ready`.
  bool has_met() const { return std::ranges::any_of(children_, &Child::ready); }
  /// Returns true if the ranks are to end, for any reason.
  bool is_ending() const { return phase_ != Phase::kRunning; }
  /// Returns true if a rank has ended successfully, which means that the job is complete.
  bool is_over() const {
    const auto is_done = [](const Child& child) { return !child.alive() && !child.failed(); };
    return std::ranges::any_of(children_, is_done);
  }
  const std::vector<Child>& ranks() const { return children_; }  ///< in ascending order
  double rss_mb() const { return rss_mb_; }  ///< peak memory of the largest rank that has ended

  // ---- called by the launcher's event loop ----

  /// Adds the ranks' pipes to `items` for poll(); disables the pipes of JSON lines unless `lines`.
  void add_to(std::vector<pollfd>& items, bool lines) const {
    for (const Child& child : children_) {
      items.push_back({lines ? child.out_fd() : -1, POLLIN, 0});
      items.push_back({child.err_fd(), POLLIN, 0});
    }
  }
  void read(bool lines);
  /// Handles ranks that have ended. Returns the lost ranks that the job continues without.
  std::vector<int> reap();
  /// Returns the time to call on_time(); kNever if there is no deadline.
  base::TimePoint next_deadline() const {
    base::TimePoint next = std::min(deadline_, kill_blamed_at_);
    for (const Child& child : children_) next = std::min(next, stopped_until(child));
    return next;
  }
  void on_time();

  // ---- signals to the ranks ----

  /// Sends `signal` to the ranks. After `grace`, kills those that have not ended.
  void end(int signal, std::chrono::nanoseconds grace) {
    send_to_all(signal);
    enter(Phase::kTerminating, grace);
  }
  /// Makes the ranks save and end unless they are ending. Call it if stdout cannot be written.
  void end_unheard();
  void kill() {
    send_to_all(SIGKILL);
    phase_ = Phase::kKilled;
    deadline_ = base::kNever;
  }
  /// Sends one living rank a signal that does not end ranks. tell_all() sends it to all ranks.
  void tell_one(int signal) {
    const auto alive = std::ranges::find_if(children_, &Child::alive);
    if (alive != children_.end()) alive->tell(signal);
  }
  void tell_all(int signal) {
    for (Child& child : children_) child.tell(signal);
  }
  /// Stops the ranks' processes; go_on() continues them and extends the deadline by `stopped`.
  void stop() {
    for (Child& child : children_) child.stop(true);
  }
  void go_on(base::Duration stopped) {
    for (Child& child : children_) child.stop(false);
    if (deadline_ != base::kNever) deadline_ += stopped;
  }

  /// Returns why a lost rank failed.
  Cause cause_of_loss(int rank) const { return cause_from(*find(rank)); }
  /// Returns why the job failed; nullopt if it did not. `ended_by`: a signal to the launcher, or 0.
  std::optional<Verdict> verdict(int ended_by) const;

 private:
  enum class Phase {
    kRunning,
    kGrace,        ///< a rank failed; the others should end by themselves
    kTerminating,  ///< the ranks got SIGTERM or the launcher's signal
    kKilled,
  };

  void start_rank(SpawnedRank spawned, int rank);
  Child* blamed_by_all();
  base::TimePoint stopped_until(const Child& child) const;
  void on_failure(const Child& child);
  std::chrono::nanoseconds failure_grace() const;
  /// Enters `phase` unless a later one has begun.
  void enter(Phase phase, std::chrono::nanoseconds grace) {
    if (phase < phase_) return;
    phase_ = phase;
    grace_ = grace;
    deadline_ = base::deadline_after(grace);
  }
  void send_to_all(int signal) {
    for (Child& child : children_) child.send(signal);
  }
  /// Returns the child that runs `rank`; null if this launcher has no such child.
  const Child* find(std::optional<int> rank) const {
    const auto child = std::ranges::find(children_, rank, &Child::rank);
    return child == children_.end() ? nullptr : &*child;
  }
  bool is_spared(const Child& child) const;
  /// Returns true if `child` replaces a lost process and could not join the job in time.
  bool never_met(const Child& child) const {
    return child.is_successor && !child.ready &&
           (child.exit_code() == exit_code(base::ErrorKind::kRendezvous) || child.killed);
  }
  bool failed_itself(const Child& child) const;
  const Child* root_cause() const;
  std::optional<Verdict> verdict_by_signal(int number) const;
  Cause cause_from(const Child& child) const;

  const LaunchPlan& plan_;
  const Child::Handlers& handlers_;
  const std::function<void(int rank)> in_child_;
  std::vector<Child> children_;
  Phase phase_ = Phase::kRunning;
  base::TimePoint deadline_ = base::kNever;
  std::chrono::nanoseconds grace_{0};  // the grace period that ends at deadline_
  base::TimePoint kill_blamed_at_ = base::kNever;
  std::optional<base::Error> start_error_;
  double rss_mb_ = 0;
  std::optional<int> stopped_rank_;  // stopped too long (SIGSTOP), and killed before any failure
};

}  // namespace distrain::app
