#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distrain/job/definition.h"

namespace distrain::app {

/// The ranks that this process runs or starts, and the address of rank 0. Some members of Contact
/// have a special meaning here: `rank` is set only if `mode` is kJoin, so use here() or
/// has_rank_0(); `job_id` and `generation` come from the external launcher; a `master_port` of 0
/// means any free port.
struct Placement : membership::Contact {
  enum class Mode { kLocal, kJoin, kSpawn };

  Mode mode = Mode::kSpawn;
  std::vector<int> ranks;  ///< kSpawn only; ascending
  std::string source;      ///< kJoin only; the option or variable that set the rank
  bool master_addr_given = false;
  int local_ranks = 1;    ///< ranks on this host; an estimate until all ranks have joined
  bool one_host = false;  ///< torchrun, mpirun or srun says that all ranks are on this host
  /// mpirun, srun or torchrun started the ranks and shows them on one terminal, where only rank 0
  /// shows the job.
  bool shares_terminal = false;
  std::string warning;  ///< text of one `warn` line; empty if there is none

  void warn(const std::string& message) { warning += (warning.empty() ? "" : "; ") + message; }
  /// Throws `invalid` naming `where` if the world size is known and has no rank `number`.
  void check_rank(int number, const std::string& where) const;
  /// Returns the ranks in this process or under it; rank 0 for kLocal.
  std::vector<int> here() const {
    if (mode == Mode::kSpawn) return ranks;
    return {mode == Mode::kLocal ? 0 : rank};
  }
  bool has_rank_0() const { return here().front() == 0; }
  bool spawns_all() const {
    return mode == Mode::kSpawn && static_cast<int>(ranks.size()) == world_size;
  }
};

/// Determines the placement from the options or from the environment. The first of these launchers
/// whose variables are set counts: torchrun, Open MPI, PMI, Slurm inside a step, an Indexed Job of
/// Kubernetes. If a world size is set, derives the job's option for the number of ranks from it. If
/// rank 0 runs here, calls `on_rank_0` before it reads the size. Throws `invalid`.
Placement place(job::ParsedOptions& options, const job::JobInfo& job,
                const std::function<void()>& on_rank_0);

/// Returns the local rank that the launcher has set, if any. Throws `invalid` if it is not valid.
std::optional<int> local_rank(const job::OptionTable& table);

}  // namespace distrain::app
