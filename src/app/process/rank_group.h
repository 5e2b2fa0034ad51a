#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include <poll.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "process/child.h"
#include "process/json_lines.h"
#include "process/launcher.h"

namespace distrain::app {

/// Returns true for signals of a program error, such as SIGSEGV, which nobody sends to end a rank.
bool is_crash(int signal);

/// The reason why a start of the job failed.
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
///
/// If the job continues without a lost rank (Child::may_be_lost), the loss is no failure unless
/// other ranks end because of it.
class RankGroup {
 public:
  /// `in_child` is called in each forked process to close the launcher's descriptors.
  RankGroup(const LaunchPlan& plan, const Child::Handlers& handlers,
            std::function<void(int rank)> in_child);

  /// Starts the ranks. If one cannot be started, kills the others; verdict() returns the error.
  void start(const SpawnedRank& told);
  /// Starts a lost rank again while the job runs. Returns false if it cannot be started now.
  bool start_again(const SpawnedRank& told, int rank);

  bool any_alive() const { return std::ranges::any_of(children_, &Child::alive); }
  /// Returns true if all ranks of the job have joined.
  bool has_met() const { return std::ranges::any_of(children_, &Child::ready); }
  /// Returns true if the ranks are to end, for any reason.
  bool is_ending() const { return phase_ != Phase::kRunning; }
  /// Returns true if a rank has ended successfully, which means that the job is complete.
  bool is_over() const;
  const std::vector<Child>& ranks() const { return children_; }  ///< in ascending order
  double rss_mb() const { return rss_mb_; }  ///< peak memory of the largest rank that has ended

  // ---- called by the launcher's event loop ----

  /// Adds the pipes to poll; those of JSON lines only if `lines`.
  void add_to(std::vector<pollfd>& items, bool lines) const;
  void read(bool lines);
  /// Handles ranks that have ended. Returns the lost ranks that the job continues without.
  std::vector<int> reap();
  /// Returns when on_time() is to be called; kNever if there is no deadline.
  base::TimePoint next_deadline() const;
  void on_time();

  // ---- signals to the ranks ----

  /// Sends `signal` to the ranks and gives them `grace` to end.
  void end(int signal, std::chrono::nanoseconds grace);
  /// Makes the ranks save and end because stdout's reader is gone, unless they were told to end.
  void end_unheard();
  void kill();
  /// Sends a signal that does not end ranks to one living rank, or to all.
  void tell_one(int signal);
  void tell_all(int signal) {
    for (Child& child : children_) child.tell(signal);
  }
  /// Stops the ranks' processes; go_on() continues them and extends the deadline by `stopped`.
  void stop() {
    for (Child& child : children_) child.stop(true);
  }
  void go_on(base::Duration stopped);

  /// Returns why a lost rank failed.
  Cause cause_of_loss(int rank) const { return cause_from(*find(rank)); }
  /// Returns null if all ranks succeeded. `ended_by`: the signal to the launcher; 0 if none.
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
  void enter(Phase phase, std::chrono::nanoseconds grace);
  void set_deadline(std::chrono::nanoseconds grace);
  void send_to_all(int signal);
  const Child* find(std::optional<int> rank) const;
  bool is_spared(const Child& child) const;
  bool never_met(const Child& child) const;
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
  std::optional<int> stopped_rank_;  // a stopped rank that was killed before any failure
};

}  // namespace distrain::app
