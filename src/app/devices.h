#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "distrain/job/definition.h"
#include "placement.h"

namespace distrain::app {

/// Throws `invalid` if `--device` is not valid for the job, as far as is known before ranks start.
void check_devices(const job::ParsedOptions& options, const job::AnyDefinition& job,
                   const Placement& placement);

/// Returns the rank's place among the ranks of its host that share the GPUs in turn, to be taken
/// modulo the number of GPUs; null if the rank takes no GPU in turn or its place is not known yet.
/// Throws `invalid` if the launcher's variable for the local rank is not valid.
std::optional<int> place_in_turn(const job::ParsedOptions& options, const job::AnyDefinition& job,
                                 const Placement& placement, int rank, const std::string& name);

/// The devices of this process's rank, which are chosen once: before its first line if possible,
/// otherwise when the options of rank 0 have arrived. Only one thread may call get(); names() and
/// usage() are thread-safe and do not wait for it.
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
  const std::vector<c10::Device>& get(const std::string& rank_name,
                                      const job::OptionMap& of_rank_0);
  /// Returns the `device` field of JSON lines; null if no devices are chosen yet.
  job::Json names() const;
  /// Returns the fields `device` and `device_mem_mb`, the peak of tensor memory; empty on the CPU.
  job::Json usage() const;

 private:
  std::vector<c10::Device> choose(const job::ParsedOptions& options, const std::string& name) const;
  std::vector<c10::Device> known() const;

  const job::ParsedOptions& options_;
  const job::AnyDefinition& job_;
  const Placement& placement_;
  int rank_;
  mutable std::mutex mutex_;
  std::vector<c10::Device> devices_;  // written once, under the mutex; get() reads without it
};

}  // namespace distrain::app
