#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "distrain/job/definition.h"
#include "placement.h"

namespace distrain::app {

/// Throws `invalid` for a `--device` that makes no sense, as far as is known before ranks start.
void check_devices(const job::ParsedOptions& options, const job::AnyDefinition& job,
                   const Placement& placement);

/// Which of the GPUs of its host a rank takes, in turn: modulo their number. None where it takes no
/// GPU, or one by its number. Throws `invalid` for an environment that makes no sense. `name` is
/// the rank's, "local" with `--local`.
std::optional<int> place_in_turn(const job::ParsedOptions& options, const job::AnyDefinition& job,
                                 const Placement& placement, int rank, const std::string& name);

/// The devices of this process's rank, which are found out once: before its first line if that is
/// possible, else once rank 0 has told the job's options. get() is for one thread; the others are
/// thread-safe, and never wait for it: it may take long.
class RankDevices {
 public:
  RankDevices(const job::ParsedOptions& options, const job::AnyDefinition& job,
              const Placement& placement, int rank)
      : options_(options), job_(job), placement_(placement), rank_(rank) {}

  /// Before get(), where the rank was not known before.
  void set_rank(int rank) { rank_ = rank; }
  /// Loads what GPUs need, if they are asked for: not before a process that forks has forked.
  /// Throws `resources`, naming the rank, without GPUs, each time.
  const std::vector<c10::Device>& get(const std::string& rank_name,
                                      const job::OptionMap& of_rank_0);
  /// As JSON lines have them; null if they are not known, or not there.
  job::Json names() const;
  /// `device` and `device_mem_mb`, the most that tensors took on one of them; empty on the CPU.
  job::Json usage() const;

 private:
  std::vector<c10::Device> choose(const job::ParsedOptions& options, const std::string& name) const;
  std::vector<c10::Device> known() const;

  const job::ParsedOptions& options_;
  const job::AnyDefinition& job_;
  const Placement& placement_;
  int rank_;
  mutable std::mutex mutex_;
  std::vector<c10::Device> devices_;  // once there are some they stay; written under the mutex
};

}  // namespace distrain::app
