#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>

#include "distrain/base/error.h"

namespace distrain::job {

/// A role of a job's ranks that `--device` can name.
struct DeviceRole {
  enum class Use {
    kCompute,  ///< the role runs on a GPU if `--device` chooses GPUs for the whole job
    kIfNamed,  ///< the role runs on the CPU unless `--device` names the role
    kNone,     ///< the role has nothing to compute on a GPU, so `--device` cannot put it there
  };

  std::string name;
  std::string alias;  ///< a second name, which `--device` also accepts; may be empty
  Use use = Use::kCompute;
};

/// The value of `--device`: one device, or ROLE=DEVICE[,…], which leaves other roles on the CPU.
/// For a GPU without an index, resolve_device() chooses the GPU.
class DeviceSpec {
 public:
  /// Throws `invalid` if `text` is malformed or has an unknown role.
  DeviceSpec(std::string_view text, std::vector<DeviceRole> roles);

  c10::Device of(const std::string& rank_name) const;
  /// Returns the device if `--device` names the rank ("trainer1") or its role, otherwise nullopt.
  std::optional<c10::Device> named(const std::string& rank_name) const;
  /// Returns the device that `--device` chooses for the whole job, or nullopt if it names roles.
  const std::optional<c10::Device>& for_all() const { return for_all_; }
  /// Throws `invalid` if `--device` names a rank that is not in `rank_names`.
  void check_ranks(const std::vector<std::string>& rank_names) const;

 private:
  const DeviceRole* class_of(std::string_view name) const;
  void add(std::string_view role, std::string_view device);

  std::vector<DeviceRole> roles_;
  std::optional<c10::Device> for_all_;
  std::map<std::string, c10::Device> by_name_;  // by the name of a role or rank, not by alias
};

/// Returns the device for `choice`. If `choice` is a GPU without an index, returns the GPU with the
/// index `place` modulo the number of GPUs. `place` is the number of lower ranks on this host that
/// have the same choice. Throws `resources` if no GPU has the index. Calls `count_gpus`, which
/// throws if the host has no GPU, only if `choice` is a GPU.
c10::Device resolve_device(const c10::Device& choice, const std::function<int()>& count_gpus,
                           int place);

/// Returns `error` with `rank` as its cause. Puts "rank 2 (trainer1): " before the message, unless
/// the message already begins with the rank's number.
base::Error error_of_rank(base::Error error, int rank, const std::string& name);

/// Calls `choose`. If it throws, applies error_of_rank() to the error and rethrows it.
std::vector<c10::Device> naming_rank(int rank, const std::string& name,
                                     const std::function<std::vector<c10::Device>()>& choose);

}  // namespace distrain::job
