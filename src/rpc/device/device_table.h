#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/rpc/agent.h"
#include "distrain/wire/handshake.h"

namespace distrain::rpc {

/// Converts a device of this process. Throws `protocol` if it does not exist.
c10::Device to_c10(wire::DeviceRef device);
/// Converts a device. Throws `invalid` if tensors on such a device cannot be sent.
wire::DeviceRef to_wire(c10::Device device);
std::string device_text(wire::DeviceRef device);

/// Returns the first error in the device maps of a job, if any: a device that does not exist, two
/// devices mapped to one, or no way back for a reply.
std::optional<base::Error> check_device_maps(const std::vector<std::string>& names,
                                             const std::vector<wire::RankDevices>& devices);

/// Determines the device on which a tensor arrives, from all ranks' devices and maps. Thread-safe.
class DeviceTable {
 public:
  DeviceTable(int rank, c10::Device home, std::vector<DeviceMap> maps);

  /// Sets this rank's device. Throws `invalid` after freeze().
  void set_home(c10::Device home);

  /// Fixes this rank's device and maps, and returns what the other ranks need to know. Queries this
  /// process's devices, so it must not run on the loop. Throws `invalid` if tensors on a device of
  /// this type cannot be sent.
  wire::RankDevices freeze();
  /// Sets the devices of all ranks, once; functions that need them wait until then.
  void learn(std::vector<std::string> names, std::vector<wire::RankDevices> devices);
  /// Replaces the devices of `rank`, which has a new process. Throws as learn() does.
  void learn_again(int rank, wire::RankDevices devices);
  void fail(const base::Error& error) { learnt_.fail(error); }

  c10::Device home() const;
  /// Returns the device of any rank. Waits for learn().
  wire::DeviceRef home_of(int rank) const;
  /// Returns the device on rank `to` where a tensor on `device` arrives. Waits for learn(), unless
  /// `device` is the CPU. Throws `invalid` if no map covers `device`.
  wire::DeviceRef target(int to, c10::Device device) const;

 private:
  using All = std::vector<wire::RankDevices>;
  /// The result is never modified.
  std::shared_ptr<const All> all() const;

  const int rank_;
  mutable std::mutex mutex_;
  c10::Device home_;             // guarded by mutex_
  std::vector<DeviceMap> maps_;  // guarded by mutex_
  bool is_frozen_ = false;       // guarded by mutex_
  base::Promise<void> learnt_;
  const base::Future<void> known_ = learnt_.future();
  std::vector<std::string> names_;  // written before `learnt_`, read after
  std::shared_ptr<const All> all_;  // guarded by mutex_
};

}  // namespace distrain::rpc
