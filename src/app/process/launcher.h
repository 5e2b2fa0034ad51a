#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "distrain/job/job.h"
#include "process/spawned_rank.h"

namespace distrain::app {

struct LaunchPlan {
  std::string cmd;
  /// What each rank is told, with its own number and descriptors. The launcher closes `listen_fd`
  /// once the ranks are there.
  SpawnedRank told;
  job::Json config;
  std::vector<int> ranks;
  std::function<std::string(int rank)> role;
  /// Runs in the child; gives its exit code.
  std::function<int(const SpawnedRank&)> rank_main;
  double peer_timeout_s = 5;
  /// How long the ranks may take to save a checkpoint when a signal ends them; 0: they save none.
  std::chrono::seconds save_grace{0};
  std::string warning;
  bool progress = false;  ///< if there is a terminal to show it on
  int epochs = 0;
};

/// Forks the ranks, carries their lines to stdout, and ends when all of them have ended. A process
/// that has threads starts them by exec as well (rank_image), which takes longer. Gives back the
/// exit code.
///
/// Everything happens on the calling thread. After the first rank that fails the others have a
/// grace to end by themselves (they notice within the peer timeout), then they get SIGTERM, then
/// SIGKILL; before all have met, the grace is a second. The first failure is the root cause, but "a
/// peer was lost" never is while another reason shows up within the grace, nor a failure that is
/// put down to another rank with a reason of its own.
int run_launcher(const LaunchPlan& plan);

}  // namespace distrain::app
