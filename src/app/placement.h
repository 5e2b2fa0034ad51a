#pragma once

#include "distrain/job/definition.h"

namespace distrain::app {

/// The ranks that this process runs or starts, and the address of rank 0. Some members of Contact
/// have a special meaning: `rank` is set only if joins(), so use here() or has_rank_0(); `job_id`
/// and `generation` come from the external launcher; a `master_port` of 0 means any free port.
struct Placement : membership::Contact {
  enum class Mode { kLocal, kJoin, kSpawn };

  Mode mode = Mode::kSpawn;
  std::vector<int> ranks;  ///< kSpawn only; ascending
  std::string source;      ///< kJoin only; the option or variable that set the rank
  bool master_addr_given = false;
  int local_ranks = 1;    ///< ranks on this host; an estimate until all ranks have joined
  bool one_host = false;  ///< torchrun, mpirun or srun says that all ranks are on this host
  /// All ranks share the terminal of mpirun, srun or torchrun, so only rank 0 shows the progress.
  bool shares_terminal = false;
  std::string warning;  ///< text of one `warn` line; empty if there is none

  bool is_local() const { return mode == Mode::kLocal; }
  bool joins() const { return mode == Mode::kJoin; }
  bool spawns() const { return mode == Mode::kSpawn; }
  void warn(const std::string& message) { warning += (warning.empty() ? "" : "; ") + message; }
  /// Throws `invalid` naming `where` if the world size is known and has no rank `number`.
  void check_rank(int number, const std::string& where) const;
  /// Returns the ranks that this process runs or starts; rank 0 for kLocal.
  std::vector<int> here() const {
    return spawns() ? ranks : std::vector<int>{is_local() ? 0 : rank};
  }
  bool has_rank_0() const { return here().front() == 0; }
  bool spawns_all() const { return spawns() && std::ssize(ranks) == world_size; }
};

/// Determines the placement from the options or from the environment. The first of these launchers
/// whose variables are set counts: torchrun, Open MPI, PMI, Slurm inside a step, an Indexed Job of
/// Kubernetes. If a world size is set, derives the job's option for the number of ranks from it. If
/// rank 0 runs here, calls `on_rank_0` before it reads the size. Throws `invalid` for bad settings.
Placement place(job::ParsedOptions& options, const job::JobInfo& job,
                const std::function<void()>& on_rank_0);

/// Returns the local rank that the launcher has set, if any. Throws `invalid` if it is not valid.
std::optional<int> local_rank(const job::OptionTable& table);

/// Throws `invalid` if `--device` is not valid for the ranks and devices that are already known.
void check_devices(const job::ParsedOptions& options, const job::AnyDefinition& job,
                   const Placement& placement);

/// Returns the rank's index among the ranks of its host that take GPUs round-robin; the GPU is this
/// index modulo the number of GPUs. Null if the rank takes none this way or its index is unknown
/// yet. Throws `invalid` if the launcher's variable for the local rank is not valid.
std::optional<int> place_in_turn(const job::ParsedOptions& options, const job::AnyDefinition& job,
                                 const Placement& placement, int rank, const std::string& name);

/// The devices of this process's rank. They are chosen once: before the rank's first JSON line if
/// possible, otherwise when rank 0's options have arrived. Only one thread may call get(). names()
/// and usage() are thread-safe and do not wait for get().
class RankDevices {
 public:
  RankDevices(const job::ParsedOptions& options, const job::AnyDefinition& job,
              const Placement& placement, int rank)
      : options_(options), job_(job), placement_(placement), rank_(rank) {}

  /// Sets the rank that rank 0 has assigned. Call it before get().
  void set_rank(int rank) { rank_ = rank; }
  /// Returns the devices; the first call chooses them, with the options that rank 0 sent, if any.
  /// Loads the CUDA libraries for a GPU, so a process that forks must fork first. Throws
  /// `resources` with the name of the rank if a GPU or its libraries are missing.
  const std::vector<c10::Device>& get(const std::string& name, const job::OptionMap& of_rank_0);
  /// Returns the `device` field of JSON lines; null if no devices are chosen yet.
  job::Json names() const;
  /// Returns the fields `device` and `device_mem_mb`, the peak of tensor memory; empty on the CPU.
  job::Json usage() const;

 private:
  std::vector<c10::Device> known() const {
    const std::lock_guard lock(mutex_);
    return devices_;
  }

  const job::ParsedOptions& options_;
  const job::AnyDefinition& job_;
  const Placement& placement_;
  int rank_;
  mutable std::mutex mutex_;
  std::vector<c10::Device> devices_;  // written once, under the mutex; get() reads without it
};

}  // namespace distrain::app
