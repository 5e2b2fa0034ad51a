#pragma once

#include "distrain/job/definition.h"

namespace distrain::app {

/// The ranks that this process runs or starts, and the address of rank 0. Some members of Contact
/// have a special meaning: `rank` is set only if joins(), so use here() or has_rank_0(); `job_id`
/// and `generation` come from torchrun, mpirun or srun; a `master_port` of 0 means any free port.
struct Placement : membership::Contact {
  enum class Mode { kLocal, kJoin, kSpawn };

  Mode mode = Mode::kSpawn;
  std::vector<int> ranks;  ///< kSpawn only; ascending
  std::string source;      ///< if kJoin: the option or variable that set the rank
  bool master_addr_given = false;
  int local_ranks = 1;    ///< number of ranks on this host; estimated until all have joined
  bool one_host = false;  ///< torchrun, mpirun or srun says that all ranks are on this host
  /// True if all ranks share the terminal of mpirun, srun or torchrun. Then only rank 0 shows the
  /// progress.
  bool shares_terminal = false;
  std::string warning;  ///< text of one `warn` line; empty if there is none

  bool is_local() const { return mode == Mode::kLocal; }
  bool joins() const { return mode == Mode::kJoin; }
  bool spawns() const { return mode == Mode::kSpawn; }
  void warn(const std::string& message) { warning += (warning.empty() ? "" : "; ") + message; }
  /// Throws `invalid` if the world size is known and has no rank `number`. The message names
  /// `where`, the option or variable that set the number.
  void check_rank(int number, const std::string& where) const;
  /// Returns the ranks that this process runs or starts; rank 0 for kLocal.
  std::vector<int> here() const {
    return spawns() ? ranks : std::vector<int>{is_local() ? 0 : rank};
  }
  bool has_rank_0() const { return here().front() == 0; }
  bool spawns_all() const { return spawns() && std::ssize(ranks) == world_size; }
};

/// Determines the placement from the options or from the variables of the first of these launchers
/// that has set any: torchrun, Open MPI, PMI, Slurm inside a step, an Indexed Job of Kubernetes. If
/// a world size is set, derives the job's option for a number of ranks, such as --trainers, from
/// the size. If rank 0 runs here, first calls `on_rank_0`, which may change that option. Throws
/// `invalid` if a setting is not valid or contradicts another.
Placement place(job::ParsedOptions& options, const job::AnyDefinition& job,
                const std::function<void()>& on_rank_0);

/// Throws `invalid` if `--device` names roles with --local, or a rank that is known not to exist.
void check_devices(const job::ParsedOptions& options, const job::AnyDefinition& job,
                   const Placement& placement);

/// Returns the rank's index among the ranks of its host that take GPUs in turn (`--device cuda`).
/// The rank then uses the GPU of this index modulo the number of GPUs. Returns nullopt if the rank
/// takes no GPU in turn or is not assigned yet. Throws `invalid` if a launcher's LOCAL_RANK is no
/// rank.
std::optional<int> place_in_turn(const job::ParsedOptions& options, const job::AnyDefinition& job,
                                 const Placement& placement, int rank, const std::string& name);

/// The devices on which this process's rank computes. get() chooses them once: before the rank's
/// first JSON line or, if they depend on rank 0's options, when those have arrived. Only one thread
/// may call get(). names() and usage() are thread-safe and do not wait for get().
class RankDevices {
 public:
  RankDevices(const job::ParsedOptions& options, const job::AnyDefinition& job,
              const Placement& placement, int rank)
      : options_(options), job_(job), placement_(placement), rank_(rank) {}

  /// Sets the rank that rank 0 has assigned. Call it before get().
  void set_rank(int rank) { rank_ = rank; }
  /// Returns the devices. The first call chooses them by this rank's options and `of_rank_0`, the
  /// options that rank 0 sent (may be empty). For a GPU it loads the CUDA libraries, so fork before
  /// this call. Throws `resources` with the name of the rank if a GPU or its libraries are missing.
  const std::vector<c10::Device>& get(const std::string& name, const job::OptionMap& of_rank_0);
  /// Returns the `device` field of JSON lines; null if get() has not chosen the devices yet.
  job::Json names() const {
    const std::vector<c10::Device> devices = known();
    return devices.empty() ? job::Json() : job::device_names(devices);
  }
  /// Returns the fields `device` and `device_mem_mb`, the peak of tensor memory; none on the CPU.
  job::Json usage() const {
    const std::vector<c10::Device> devices = known();
    if (devices.empty() || !rpc::is_accelerator(devices.front())) return job::Json::object();
    int64_t most = 0;
    for (const c10::Device& device : devices) most = std::max(most, rpc::peak_device_bytes(device));
    return {{"device", names()}, {"device_mem_mb", static_cast<double>(most) / (1 << 20)}};
  }

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
  std::vector<c10::Device> devices_;  // get() writes it once, with the mutex, and reads it without
};

}  // namespace distrain::app
