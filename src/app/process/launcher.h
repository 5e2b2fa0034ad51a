#pragma once

#include "placement.h"
#include "process/display.h"
#include "process/process_setup.h"

namespace distrain::app {

/// The settings that a spawned rank gets besides the launcher's command line.
struct SpawnedRank : membership::Contact {
  base::TimePoint started;      ///< when the launcher started
  int out_fd = -1;              ///< the descriptor for the rank's JSON lines
  std::string run_id;           ///< empty if another launcher has rank 0
  bool shows_progress = false;  ///< the launcher displays the ranks' progress
  std::string resume;           ///< replaces the user's --resume unless empty
};

/// Returns a function that executes this program again as `rank` and, if exec fails, returns an
/// exit code. Forked ranks of a launcher with several threads must call it, because OpenMP would
/// wait for threads that fork() does not copy. It allocates no memory, because such a thread may
/// have held the heap's lock. Throws `resources` if the token cannot be stored for the rank.
std::function<int()> rank_image(const SpawnedRank& rank);

/// Returns the settings if this process was started by rank_image(), otherwise null. Removes them
/// from the environment, so that child processes of the rank do not inherit them.
std::optional<SpawnedRank> take_spawned_rank();

struct LaunchPlan {
  std::string cmd;
  /// Settings for all ranks; `rank` and `out_fd` are set per rank. The launcher owns `listen_fd`.
  SpawnedRank told;
  job::Json config;
  std::vector<int> ranks;
  std::function<std::string(int rank)> role;
  /// Runs the rank in its process and returns the exit code.
  std::function<int(const SpawnedRank&)> rank_main;
  double peer_timeout_s = 5;
  /// Time to end after a signal or after the last progress of a save; 0 if the job does not save.
  std::chrono::seconds save_grace{0};
  int max_restarts = 0;
  /// Returns the newest checkpoint. Unset if another launcher has rank 0 or the job does not save.
  std::function<std::optional<std::string>()> newest_checkpoint;
  std::string warning;
  DisplayPlan display;
};

/// Forks the ranks, forwards their lines to stdout, and returns the exit code when all ranks have
/// ended. Starts no thread; if the process already has other threads, the ranks also call exec. If
/// ranks fail for a reason that may be temporary, starts them again, at most `max_restarts` times,
/// after a pause that grows as long as the job makes no progress.
int run_launcher(const LaunchPlan& plan);

/// The rank that this process runs: a spawned rank, a rank that joins, or the local job.
struct RankRun {
  std::string role;  ///< empty if unknown before this rank has joined
  job::Job job;
  /// Returns the `config` field. If `of_rank_0` is empty, options inherited from rank 0 are null.
  std::function<job::Json(const job::OptionMap& of_rank_0)> config;
  job::Json data;  ///< the training data, for `start`
  std::string warning;
  int threads = 0;
  int local_ranks = 1;
  std::shared_ptr<RankDevices> devices;
  bool knows_devices = false;  ///< the devices do not depend on rank 0's options
  bool all_here = false;       ///< one launcher runs all ranks, or the job is local
  int out_fd = -1;
  bool shows_progress = false;  ///< the rank is spawned, and the launcher shows its progress
  DisplayPlan display;          ///< if the rank is not spawned
  std::function<job::Outcome(const job::Job&, job::EventSink&)> body;
};

/// Runs a rank and returns the exit code: emits `start`, runs the body, emits `error` if the body
/// throws, then emits the last line. A thread handles signals; if one stopped the body, the exit
/// code is the signal's. If stdout cannot be written, stops a job that saves and exits from any
/// other. Call _exit() or leave_process() afterwards, because threads may still run.
///
/// `start` is the first line, before this rank contacts rank 0: on a rank that joins, `world_size`,
/// `role`, `device` and inherited fields of `config` may be null in it.
int run_rank(const RankRun& run);

}  // namespace distrain::app
