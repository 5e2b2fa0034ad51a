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
  /// What each rank is told, with its own number and descriptors. The launcher closes `listen_fd`
  /// once no rank will need it any more.
  SpawnedRank told;
  job::Json config;
  std::vector<int> ranks;
  std::function<std::string(int rank)> role;
  /// Runs in the child; gives its exit code.
  std::function<int(const SpawnedRank&)> rank_main;
  double peer_timeout_s = 5;
  /// How long the ranks may take after a signal without progress of a save; 0: they save none.
  std::chrono::seconds save_grace{0};
  int max_restarts = 0;
  /// Returns the newest checkpoint that rank 0 saved; null if rank 0 is elsewhere or saves none.
  std::function<std::optional<std::string>()> newest_checkpoint;
  std::string warning;
  DisplayPlan display;
};

/// Forks the ranks, carries their lines to stdout, and ends when all of them have ended. A process
/// that has threads starts them by exec as well (rank_image), which takes longer. Gives back the
/// exit code. Everything happens on the calling thread.
///
/// Ranks that fail for a reason that may pass are started again, `max_restarts` times at most,
/// after a pause that grows while the job gets no further.
int run_launcher(const LaunchPlan& plan);

}  // namespace distrain::app
