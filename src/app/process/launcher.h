#pragma once

#include "placement.h"
#include "process/display.h"
#include "process/output.h"
#include "process/process_setup.h"

namespace distrain::app {

/// The settings that the launcher gives to a rank that it starts, besides its own command line.
struct SpawnedRank : membership::Contact {
  base::TimePoint started;      ///< start time of the launcher
  int out_fd = -1;              ///< the descriptor for the rank's JSON lines
  std::string run_id;           ///< empty if another launcher has rank 0
  bool shows_progress = false;  ///< the launcher displays the ranks' progress
  std::string resume;           ///< replaces the user's --resume unless empty
  job::OptionMap options;       ///< the user's options, so that --config is read only once
};

/// Returns a function that executes this program again as `rank` and, if exec fails, returns an
/// exit code. Ranks forked by a launcher with several threads must call the function, because
/// OpenMP would wait for threads that fork() does not copy. The function allocates no memory: one
/// of these threads may have held the heap's lock. Throws `resources` if it cannot pass the token.
std::function<int()> rank_image(const SpawnedRank& rank);

/// Returns this rank's settings if rank_image() started this process, otherwise nullopt. Removes
/// them from the environment, so that child processes of the rank do not inherit them.
std::optional<SpawnedRank> take_spawned_rank();

struct LaunchPlan {
  std::string cmd;
  /// Settings for all ranks; `rank` and `out_fd` are set per rank. The launcher owns `listen_fd`.
  SpawnedRank told;
  job::Json config;
  std::vector<int> ranks;
  std::function<std::string(int rank)> role;
  /// Runs a rank in its forked process and returns the exit code.
  std::function<int(const SpawnedRank&)> rank_main;
  double peer_timeout_s = 5;
  /// How long ranks may take to end after a signal, or after the last progress of a save, before
  /// the launcher kills them; 0 if the job does not save.
  std::chrono::nanoseconds save_grace{0};
  int max_restarts = 0;
  /// Returns the newest checkpoint. Null if another launcher has rank 0 or the job does not save.
  std::function<std::optional<std::string>()> newest_checkpoint;
  std::string warning;
  DisplayPlan display;
  LogFile* log = nullptr;
};

/// Forks the ranks, forwards their lines to stdout, and returns the exit code when all ranks have
/// ended. Starts no thread; if the process already has other threads, the ranks call rank_image().
/// If ranks fail for a reason that may be temporary, starts them again, at most `max_restarts`
/// times, after a pause that grows as long as the job makes no progress.
int run_launcher(const LaunchPlan& plan);

/// The rank that this process runs: a spawned rank, a rank that joins, or the local job.
struct RankRun {
  std::string role;  ///< empty if unknown before this rank has joined
  job::Job job;
  /// Returns the `config` field of JSON lines. `of_rank_0` has rank 0's options; while it is empty,
  /// options that this rank inherits from rank 0 are null.
  std::function<job::Json(const job::OptionMap& of_rank_0)> config;
  job::Json data;  ///< the name of the training data, for the `start` line
  std::string warning;
  int threads = 0;
  int local_ranks = 1;
  std::shared_ptr<RankDevices> devices;
  bool knows_devices = false;  ///< the devices do not depend on rank 0's options
  bool all_here = false;       ///< one launcher runs all ranks, or the job is local
  int out_fd = -1;
  bool shows_progress = false;  ///< the rank is spawned, and the launcher shows its progress
  DisplayPlan display;          ///< not set for a spawned rank, whose launcher shows its progress
  LogFile* log = nullptr;       ///< not set for a spawned rank, whose launcher logs its lines
  std::function<job::Outcome(const job::Job&, job::EventSink&)> body;
};

/// Runs a rank and returns the exit code: emits `start`, runs the body, emits `error` if the body
/// throws, then emits the last line. A thread handles signals; if signal n stopped the body, the
/// exit code is 128 + n. If stdout cannot be written, makes a job with checkpoints save and end,
/// and exits from any other job. Call _exit() or leave_process() afterwards: threads may still run.
///
/// The `start` line is emitted before this rank contacts rank 0. If this rank joins, `world_size`,
/// `role`, `device` and inherited fields of `config` may therefore be null in the line.
int run_rank(const RankRun& run);

}  // namespace distrain::app
