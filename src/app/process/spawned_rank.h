#pragma once

#include <functional>
#include <optional>
#include <string>

#include "distrain/job/job.h"

namespace distrain::app {

/// What a rank of the launcher's is told beside the command line, which it shares with it.
struct SpawnedRank : job::Contact {
  int out_fd = -1;              ///< for its JSON lines
  std::string run_id;           ///< empty: rank 0 is elsewhere
  bool shows_progress = false;  ///< the launcher shows how far the ranks are
  std::string resume;           ///< in place of the user's --resume; empty: that holds
};

/// This program once more, from its main(), as a rank: instead of a mere fork, which leaves behind
/// the threads that a process has by then. OpenMP's next parallel region would wait for them.
///
/// What is given back is to be called in a child of this process; it returns only what to exit with
/// where the program cannot be executed. It allocates nothing, as a lock may be held by a thread
/// left behind. The arguments are the launcher's, so that main() does what it did. What the rank is
/// told travels in the environment, where no parser of the program's meets it.
std::function<int()> rank_image(const SpawnedRank& rank);

/// What this process is told if it is such a rank. Once: what the rank starts itself is none.
std::optional<SpawnedRank> take_spawned_rank();

}  // namespace distrain::app
