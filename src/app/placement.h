#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distrain/job/definition.h"

namespace distrain::app {

/// Which ranks run in or under this process, and where rank 0 is.
struct Placement {
  enum class Mode { kLocal, kJoin, kSpawn };

  Mode mode = Mode::kSpawn;
  int rank = -1;           ///< kJoin; rpc::kAnyRank: rank 0 will say which
  std::vector<int> ranks;  ///< kSpawn: ascending
  int world_size = 0;      ///< 0: follow rank 0
  std::string source;      ///< of the rank: a flag or a variable, empty when spawning
  std::string master_addr = "localhost";
  bool master_addr_given = false;
  int master_port = 0;    ///< 0: any free one
  int local_ranks = 1;    ///< on this host, as far as one can tell before the ranks have met
  bool one_host = false;  ///< the launcher that started this rank says that all ranks are here
  std::string job_id;     ///< what the launcher of the ranks calls the job; empty: nothing
  std::optional<uint32_t> generation;  ///< how often that launcher has started it again
  std::string warning;                 ///< for one `warn` line, empty if there is nothing to say

  void warn(const std::string& message) { warning += (warning.empty() ? "" : "; ") + message; }
  /// Throws `invalid` naming `where` if the world has no rank `number`, as far as its size is
  /// known.
  void check_rank(int number, const std::string& where) const;
  /// Those in or under this process, whatever the mode; kLocal: rank 0.
  std::vector<int> here() const {
    if (mode == Mode::kSpawn) return ranks;
    return {mode == Mode::kLocal ? 0 : rank};
  }
  bool has_rank_0() const { return here().front() == 0; }
  bool spawns_all() const {
    return mode == Mode::kSpawn && static_cast<int>(ranks.size()) == world_size;
  }
};

/// Found first wins: flag, torchrun's variables, Open MPI's, PMI's, Slurm's inside a step. Throws
/// `invalid`. Sets the option that the number of ranks depends on when the world's size determines
/// it. `on_rank_0` is called when rank 0 turns out to run here, before the size is looked at.
Placement place(job::ParsedOptions& options, const job::JobInfo& job,
                const std::function<void()>& on_rank_0);

/// The number of this process among its host's, as its launcher says. Throws `invalid`.
std::optional<int> local_rank(const job::OptionTable& table);

}  // namespace distrain::app
