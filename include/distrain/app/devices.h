#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "distrain/app/options.h"
#include "distrain/app/placement.h"
#include "distrain/cuda/device_choice.h"

namespace distrain::app {

/// What a job's ranks can be put on, beside `--device`.
struct DeviceRules {
  std::vector<cuda::DeviceRole> roles;
  /// GPUs, 0 and on, that a rank takes in place of its `--device`; none: as that says. May be null.
  std::function<std::optional<int>(const ParsedOptions&, const std::string& rank_name)> gpus_of;
};

/// `--device` of a job with these roles.
cuda::DeviceSpec device_spec(const ParsedOptions& options, const DeviceRules& rules);

/// Throws `invalid` for a `--device` that makes no sense, as far as it can be known before any rank
/// starts.
void check_devices(const ParsedOptions& options, const DeviceRules& rules,
                   const Placement& placement,
                   const std::function<std::string(const ParsedOptions&, int rank)>& role);

/// What the devices of one rank depend on. `name` is the rank's, "local" with `--local`; `options`
/// have what rank 0 told.
struct DevicePlace {
  int rank = 0;
  std::string name;
  std::function<std::string(const ParsedOptions&, int rank)> role;  ///< of any rank
};

/// Which of the GPUs of its host the rank takes, in turn: modulo their number. None where it takes
/// no GPU, or one by its number. Throws `invalid` for an environment that makes no sense.
std::optional<int> place_in_turn(const ParsedOptions& options, const DeviceRules& rules,
                                 const Placement& placement, const DevicePlace& place,
                                 const Environment& environment);

/// Loads what GPUs need, if they are asked for: not before a process that forks has forked. Throws
/// `resources`, naming the rank, where there are none.
std::vector<c10::Device> choose_devices(const ParsedOptions& options, const DeviceRules& rules,
                                        const Placement& placement, const DevicePlace& place,
                                        const Environment& environment);

/// The devices of this process's rank, which are found out once: before its first line if that is
/// possible, else once rank 0 has told the job's options. get() is for one thread; the others are
/// thread-safe, and never wait for it: it may take long.
class RankDevices {
 public:
  using Choose = std::function<std::vector<c10::Device>(const std::string& rank_name,
                                                        const job::OptionMap& of_rank_0)>;
  explicit RankDevices(Choose choose) : choose_(std::move(choose)) {}

  /// Throws what the first call threw.
  const std::vector<c10::Device>& get(const std::string& rank_name,
                                      const job::OptionMap& of_rank_0);
  /// As JSON lines have them; null if they are not known, or not there.
  Json names() const;
  bool has_accelerator() const;
  /// `device` and `device_mem_mb`, the most that tensors took on one of them; empty on the CPU.
  Json usage() const;

 private:
  std::vector<c10::Device> known() const;

  const Choose choose_;
  mutable std::mutex mutex_;
  std::vector<c10::Device> devices_;  // once there are some they stay; written under the mutex
  std::exception_ptr error_;
};

}  // namespace distrain::app
