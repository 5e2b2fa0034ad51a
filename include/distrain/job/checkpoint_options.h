#pragma once

#include <cstdint>
#include <string>

namespace distrain::job {

/// `--checkpoint`, `--checkpoint-every`, `--resume` and `--keep`, as every job takes them. Rank 0
/// reads and writes the files; the other ranks only have to know whether and when there are any.
struct CheckpointOptions {
  std::string dir;     ///< empty: nothing is saved
  int64_t every = 0;   ///< steps of each trainer; 0: at the end of each epoch
  std::string resume;  ///< empty: start afresh; "auto": the newest in `dir`, if any; else a path
  int64_t keep = 2;    ///< checkpoints that are left in `dir`
};

}  // namespace distrain::job
