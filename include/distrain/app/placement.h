#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distrain/app/options.h"

namespace distrain::app {

using Environment = std::function<std::optional<std::string>(const char* name)>;

/// The environment of this process.
std::optional<std::string> process_environment(const char* name);

/// How an option sets the size of the world: `--trainers N` makes N + 2 ranks.
struct SizeRule {
  std::string option;
  int extra_ranks = 0;
};

/// Which ranks run in or under this process, and where rank 0 is.
struct Placement {
  enum class Mode { kLocal, kJoin, kSpawn };

  Mode mode = Mode::kSpawn;
  int rank = -1;           ///< kJoin
  std::vector<int> ranks;  ///< kSpawn: ascending
  int world_size = 0;      ///< 0: follow rank 0
  std::string source;      ///< of the rank: a flag or a variable, empty when spawning
  std::string master_addr = "localhost";
  bool master_addr_given = false;
  int master_port = 0;  ///< 0: any free one
  int local_ranks = 1;  ///< on this host, as far as one can tell
  std::string warning;  ///< for one `warn` line, empty if there is nothing to say

  void warn(const std::string& message) { warning += (warning.empty() ? "" : "; ") + message; }
  /// Whether rank 0 runs in or under this process.
  bool has_rank_0() const {
    if (mode == Mode::kSpawn) return ranks.front() == 0;
    return mode == Mode::kLocal || rank == 0;
  }
  bool spawns_all() const {
    return mode == Mode::kSpawn && static_cast<int>(ranks.size()) == world_size;
  }
};

/// Found first wins: flag, torchrun's variables, Open MPI's, PMI's, Slurm's inside a step. Throws
/// `invalid`. Sets the size option in `options` when the world's size determines it. `on_rank_0` is
/// called when rank 0 turns out to run here, before the size is looked at.
Placement place(
    ParsedOptions& options, const SizeRule& rule, const Environment& environment,
    const std::function<void()>& on_rank_0 = [] {});

}  // namespace distrain::app
