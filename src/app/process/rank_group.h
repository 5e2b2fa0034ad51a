#pragma once

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

/// Whether a signal means that the program itself went wrong, rather than somebody ending it.
bool is_crash(int signal);

/// Why ranks did not do what they were to do.
struct Verdict {
  Cause cause;
  bool by_signal = false;  ///< that one of them, or the launcher, was to end by
  Json error;              ///< the `error` line of the rank that has said so; null: none could
};

/// The ranks of one start of a job, here, from the first fork to the last end.
///
/// After the first rank that fails the others have a grace to end by themselves (they notice within
/// the peer timeout), then they get SIGTERM, then SIGKILL; before all have met, the grace is short.
/// The first failure is the root cause, but "a peer was lost" never is while another reason shows
/// up within the grace, nor a failure that is put down to another rank with a reason of its own.
///
/// A rank that the job goes on without (Child::may_be_lost) may be lost: that is no failure, unless
/// others say that they end because of it.
class RankGroup {
 public:
  /// `in_child` is called in each rank that is forked, to close what is not for it.
  RankGroup(const LaunchPlan& plan, const Child::Handlers& handlers,
            std::function<void(int rank)> in_child);

  /// Forks them, or none. All are told `told`, rank 0 its `listen_fd`.
  void start(const SpawnedRank& told);

  /// Starts a lost rank once more, in the midst of the job. False: it cannot be started now.
  bool start_again(const SpawnedRank& told, int rank);

  bool any_alive() const;
  /// All ranks of the job have found each other.
  bool has_met() const;
  /// They are to end, for whatever reason: nobody is to be waited for.
  bool is_ending() const { return phase_ != Phase::kRunning; }
  /// One of them has ended well: so do the others.
  bool is_over() const;
  /// Ascending by rank.
  const std::vector<Child>& ranks() const { return children_; }
  /// Of the largest rank that has ended.
  double rss_mb() const { return rss_mb_; }

  // ---- what the launcher's loop does ----

  /// Adds what is to be waited for; JSON lines only if `lines`.
  void add_to(std::vector<pollfd>& items, bool lines) const;
  void read(bool lines);
  /// Sees to those that have ended. Gives back the ranks that were lost, and the job goes on.
  std::vector<int> reap();
  /// When on_time() is to be called; kNever: not yet known.
  base::TimePoint next_deadline() const;
  void on_time();

  // ---- what the launcher asks of them ----

  /// They got `signal`, or are to, and may take `grace` to end by it.
  void end(int signal, std::chrono::nanoseconds grace);
  /// Nobody reads what they write: they are to save and end, unless they are to end already.
  void end_unheard();
  void kill();
  /// To one of them, or to all, a signal that does not end them.
  void tell_one(int signal);
  void tell_all(int signal);
  /// Stops their processes; has them go on.
  void stop();
  void go_on(base::Duration stopped);

  /// Why a rank that was lost is.
  Cause cause_of_loss(int rank) const { return cause_from(*find(rank)); }
  /// None: all have ended well. `ended_by`: the signal that the launcher got, 0 if none.
  std::optional<Verdict> verdict(int ended_by) const;

 private:
  enum class Phase {
    kRunning,
    kGrace,        ///< a rank failed; the others should end by themselves
    kTerminating,  ///< they got SIGTERM, or the signal that the launcher got
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
  std::chrono::nanoseconds grace_{0};  // that deadline_ follows from
  base::TimePoint kill_blamed_at_ = base::kNever;
  std::optional<base::Error> start_error_;
  double rss_mb_ = 0;
  std::optional<int> stopped_rank_;  // that had to be killed before anybody else had failed
};

}  // namespace distrain::app
