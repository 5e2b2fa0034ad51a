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
    kCompute,  ///< the role is on a GPU if the job is
    kIfNamed,  ///< the role is on the CPU unless `--device` names it
    kNone,     ///< the role computes nothing that a GPU could
  };

  std::string name;   ///< "trainer" stands for the ranks trainer, trainer0, trainer1, …
  std::string alias;  ///< another name of the role; may be empty
  Use use = Use::kCompute;
};

/// A device that the user has asked for.
struct DeviceChoice {
  bool accelerator = false;
  std::optional<int> index;  ///< of the accelerator; unset: chosen by the rank's place on its host
  bool operator==(const DeviceChoice&) const = default;
};

/// The accelerators of this process: its GPUs, or a fake in tests.
class Accelerators {
 public:
  virtual ~Accelerators() = default;
  /// Returns the type; its name is a value of `--device`: "cuda".
  virtual c10::DeviceType type() const = 0;
  /// Returns the number of devices; throws `resources` if there is none. May be slow at first.
  virtual int count() const = 0;
};

/// The value of `--device`: `cpu`, `cuda` or `cuda:1` for the whole job, or ROLE=DEVICE[,…], which
/// leaves all other roles on the CPU.
class DeviceSpec {
 public:
  /// Throws `invalid` for a malformed `text` or unknown role. `accelerator` is the non-CPU type.
  DeviceSpec(std::string_view text, c10::DeviceType accelerator, std::vector<DeviceRole> roles);

  /// Returns the device for rank `rank_name` ("trainer1"), chosen by that name or by its role.
  DeviceChoice of(const std::string& rank_name) const;
  /// Returns the device for the rank if `--device` names the rank or its role, else nothing.
  std::optional<DeviceChoice> named(const std::string& rank_name) const;
  /// Returns the device for the whole job, or nothing if `--device` names roles.
  const std::optional<DeviceChoice>& for_all() const { return for_all_; }
  /// Throws `invalid` if `--device` names a rank that is not in `rank_names`.
  void check_ranks(const std::vector<std::string>& rank_names) const;

 private:
  const DeviceRole* class_of(std::string_view name) const;
  std::string known_roles() const;
  void add(std::string_view role, std::string_view device, c10::DeviceType accelerator);

  std::vector<DeviceRole> roles_;
  std::optional<DeviceChoice> for_all_;
  std::map<std::string, DeviceChoice> by_name_;  // by role or rank, never by alias
};

/// Returns the device that `choice` means. `place` numbers the ranks of a host that share its
/// accelerators. Without an index, ranks take the accelerators in turn and may have to share them.
/// Throws `resources` if there is no accelerator, or none with that index.
c10::Device resolve_device(const DeviceChoice& choice, const Accelerators& accelerators, int place);

/// Returns `error` with this rank as its cause. Its message begins with "rank 2 (trainer1): ",
/// which is added unless the message names the rank already.
base::Error error_of_rank(base::Error error, int rank, const std::string& name);

/// Calls `choose`. Rethrows its exceptions, including LibTorch's, as error_of_rank().
std::vector<c10::Device> naming_rank(int rank, const std::string& name,
                                     const std::function<std::vector<c10::Device>()>& choose);

}  // namespace distrain::job
