#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "process/child.h"
#include "process/output.h"
#include "process/process_setup.h"
#include "process/progress.h"
#include "process/spawned_rank.h"
#include "process/summary.h"

namespace distrain::app {

struct LaunchPlan {
  std::string cmd;
  std::string run_id;  ///< empty: rank 0 is not here
  job::Json config;
  std::vector<int> ranks;
  std::function<std::string(int rank)> role;
  /// Runs in the child; gives its exit code.
  std::function<int(const SpawnedRank&)> rank_main;
  base::TimePoint started;
  std::string master_addr;
  uint16_t master_port = 0;
  double peer_timeout_s = 5;
  /// How long the ranks may take to save a checkpoint when a signal ends them; 0: they save none.
  std::chrono::seconds save_grace{0};
  int listen_fd = -1;  ///< rank 0's; the launcher closes it once the ranks are there
  std::string warning;
  bool progress = false;
  int epochs = 0;
};

/// Forks the ranks, carries their lines to stdout, and ends when all of them have ended. A process
/// that has threads starts them by exec as well (RankImage), which takes longer.
///
/// Everything happens on the thread of run(). After the first rank that fails the others
/// have a grace to end by themselves (they notice within the peer timeout), then they get SIGTERM,
/// then SIGKILL; before all have met, the grace is a second. The first failure is the root cause,
/// but "a peer was lost" never is while another reason shows up within the grace, nor a failure
/// that is put down to another rank with a reason of its own.
class Launcher {
 public:
  explicit Launcher(LaunchPlan plan);

  /// Gives back the exit code.
  int run();

 private:
  enum class Phase {
    kRunning,
    kGrace,        ///< a rank failed; the others should end by themselves
    kTerminating,  ///< they got SIGTERM, or the signal that we got
    kKilled,
  };

  void block_signals();
  void start_children();
  void start_child(int rank, bool by_exec);
  void wait_for_children();
  void enter(Phase phase);
  int poll_timeout_ms() const;
  void on_signals();
  void on_deadline();
  void reap_children();
  std::chrono::nanoseconds failure_grace() const;
  void on_failure(const Child& child);
  void on_write_error(int error);
  void pump();
  void tell(const char* event, const Json& fields);
  void show_text(const std::string& line);
  bool is_excused(const Child& child) const;
  bool all_stopped() const;
  std::optional<Cause> stop_cause() const;
  bool blames_another(const Child& child) const;
  const Child* root_cause() const;
  Cause cause_from(const Child& child) const;
  std::optional<Cause> find_cause();
  int finish();
  bool is_alive(std::optional<int> rank) const;
  bool any_alive() const;
  void send_to_all(int signal);

  const LaunchPlan plan_;
  OutputQueue output_;
  Progress progress_;
  Child::Handlers handlers_;
  std::vector<std::unique_ptr<Child>> children_;
  Phase phase_ = Phase::kRunning;
  base::TimePoint deadline_ = base::TimePoint::max();
  int signal_fd_ = -1;
  int ended_by_signal_ = 0;
  base::TimePoint signalled_at_{};
  bool stop_waiting_ = false;  ///< a second signal: stdout is not waited for either
  int write_error_ = 0;
  std::optional<base::Error> start_error_;
};

}  // namespace distrain::app
