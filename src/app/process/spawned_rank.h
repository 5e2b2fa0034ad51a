#pragma once

#include <functional>
#include <optional>
#include <string>

#include "distrain/job/job.h"

namespace distrain::app {

/// Settings of a spawned rank, beside those on the launcher's command line, which the rank shares.
struct SpawnedRank : membership::Contact {
  base::TimePoint started;      ///< when the launcher started
  int out_fd = -1;              ///< the descriptor for the rank's JSON lines
  std::string run_id;           ///< empty if another launcher has rank 0
  bool shows_progress = false;  ///< the launcher displays the ranks' progress
  std::string resume;           ///< replaces the user's --resume unless empty
};

/// Returns a function that executes this program again as `rank`, with the launcher's arguments and
/// the settings in the environment. Throws `resources` if the arguments or the token cannot be
/// prepared. Use the function in a forked child if the parent has other threads: without exec,
/// OpenMP would wait for those threads in the child. The function does not allocate memory, because
/// a thread of the parent may have held the heap's lock. It returns an exit code if exec fails.
std::function<int()> rank_image(const SpawnedRank& rank);

/// Returns the settings if this process was started by rank_image(), otherwise null. Removes them
/// from the environment, so that child processes of the rank do not take them.
std::optional<SpawnedRank> take_spawned_rank();

}  // namespace distrain::app
