#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>

#include "distrain/base/error.h"

namespace distrain::cuda {

/// A class of a job's ranks, as `--device` may name it.
struct DeviceRole {
  enum class Use {
    kCompute,  ///< it is on a GPU when the job is
    kIfNamed,  ///< it is on the CPU unless it is named
    kNone,     ///< it computes nothing that a GPU could
  };

  std::string name;   ///< "trainer": of the ranks trainer, trainer0, trainer1, …
  std::string alias;  ///< another name of it, may be empty
  Use use = Use::kCompute;
};

/// A device as a user asks for it.
struct DeviceChoice {
  bool accelerator = false;
  std::optional<int> index;  ///< of the accelerator; none: by the rank's place on its host
  bool operator==(const DeviceChoice&) const = default;
};

/// Which accelerators this process has: the GPUs, or what a test puts in their place.
class Accelerators {
 public:
  virtual ~Accelerators() = default;
  /// By which it is named, too: "cuda".
  virtual c10::DeviceType type() const = 0;
  /// At least one; throws `resources` where there is none. The first call may take its time.
  virtual int count() const = 0;
};

/// What `--device` says: `cpu`, `cuda` or `cuda:1` for the whole job, or ROLE=DEVICE[,…], where the
/// roles that are not named are on the CPU.
class DeviceSpec {
 public:
  /// Throws `invalid`. `accelerator`: the kind that there is beside the CPU.
  DeviceSpec(std::string_view text, c10::DeviceType accelerator, std::vector<DeviceRole> roles);

  /// Of the rank with this name ("trainer1"), by that name or that of its class.
  DeviceChoice of(const std::string& rank_name) const;
  /// The same if the rank or its class is named.
  std::optional<DeviceChoice> named(const std::string& rank_name) const;
  /// The one device of the whole job, unless roles are named.
  const std::optional<DeviceChoice>& for_all() const { return for_all_; }
  /// Throws `invalid` if a rank is named that is not among these.
  void check_ranks(const std::vector<std::string>& rank_names) const;

 private:
  const DeviceRole* class_of(std::string_view name) const;
  std::string known_roles() const;
  void add(std::string_view role, std::string_view device, c10::DeviceType accelerator);

  std::vector<DeviceRole> roles_;
  std::optional<DeviceChoice> for_all_;
  std::map<std::string, DeviceChoice> by_name_;  // of a class, or a rank: never an alias
};

/// The device that is meant. `place`: the rank's among those of its host that share the
/// accelerators; one without an index is taken in turn, so that ranks may have to share it. Throws
/// `resources` if there is none, or none with that index.
c10::Device resolve(const DeviceChoice& choice, const Accelerators& accelerators, int place);

/// `error` as one of this rank: its message begins with "rank 2 (trainer1): ", unless it does so
/// already, and the rank is the cause.
base::Error error_of_rank(base::Error error, int rank, const std::string& name);

/// Runs `choose`; what it throws, LibTorch's errors too, is an error_of_rank().
std::vector<c10::Device> naming_rank(int rank, const std::string& name,
                                     const std::function<std::vector<c10::Device>()>& choose);

}  // namespace distrain::cuda
