#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distrain/job/job.h"
#include "process/display.h"
#include "process/spawned_rank.h"

namespace distrain::app {

struct LaunchPlan {
  std::string cmd;
  /// Settings for all ranks; the launcher sets each rank's number and descriptors. It closes
  /// `listen_fd` when no later rank 0 can need it.
  SpawnedRank told;
  job::Json config;
  std::vector<int> ranks;
  std::function<std::string(int rank)> role;
  /// Runs the rank in its process and returns the exit code.
  std::function<int(const SpawnedRank&)> rank_main;
  double peer_timeout_s = 5;
  /// Time to end after a signal without progress of a save; 0 if the job does not save.
  std::chrono::seconds save_grace{0};
  int max_restarts = 0;
  /// Returns the newest checkpoint. Unset if another launcher has rank 0 or the job does not save.
  std::function<std::optional<std::string>()> newest_checkpoint;
  std::string warning;
  DisplayPlan display;
};

/// Forks the ranks, forwards their lines to stdout, and returns the exit code when all ranks have
/// ended. Uses the calling thread only; if there are others, the ranks also call exec. If ranks
/// fail for a reason that may be temporary, starts them again, at most `max_restarts` times, after
/// a pause that grows as long as the job makes no progress.
int run_launcher(const LaunchPlan& plan);

}  // namespace distrain::app
