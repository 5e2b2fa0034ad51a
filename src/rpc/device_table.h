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

/// The device of this process that `device` names. Throws `protocol` for one that it has not got.
c10::Device to_c10(wire::DeviceRef device);
/// Throws `invalid` for a type of device whose tensors do not travel.
wire::DeviceRef to_wire(c10::Device device);
std::string device_text(wire::DeviceRef device);

/// The first thing in the device maps of a job that makes no sense: a device that is not there, two
/// that are mapped to one, no way back for a reply.
std::optional<base::Error> check_device_maps(const std::vector<std::string>& names,
                                             const std::vector<wire::RankDevices>& devices);

/// Where tensors of devices go: by this rank's device and maps, and all ranks' later. Thread-safe.
class DeviceTable {
 public:
  DeviceTable(int rank, c10::Device home, std::vector<DeviceMap> maps);

  /// Throws `invalid` once it holds.
  void set_home(c10::Device home);

  /// From here on this rank's own device and maps hold. Looks at the devices of this process, so
  /// not on the loop. Throws `invalid` for a type of device whose tensors do not travel.
  void settle();
  /// What the other ranks are told, once it holds.
  wire::RankDevices tell() const;
  /// What they told, by rank; once. Before that, nobody can say where a tensor is to go.
  void learn(std::vector<std::string> names, std::vector<wire::RankDevices> devices);
  /// A new process has the place of `rank`. Throws as learn().
  void learn_again(int rank, wire::RankDevices devices);
  void fail(const base::Error& error) { learnt_.fail(error); }

  c10::Device home() const;
  /// Of any rank.
  wire::DeviceRef home_of(int rank) const;
  /// Where on rank `to` a tensor on `device` arrives. Waits until the ranks are connected, unless
  /// it is on the CPU. Throws `invalid` where there is no way.
  wire::DeviceRef target(int to, c10::Device device) const;

 private:
  using All = std::vector<wire::RankDevices>;
  /// Once they are known. They stay as they are while somebody reads them.
  std::shared_ptr<const All> all() const;

  const int rank_;
  mutable std::mutex mutex_;
  c10::Device home_;                      // by mutex_
  std::vector<DeviceMap> maps_;           // by mutex_
  std::optional<wire::RankDevices> own_;  // by mutex_; what holds
  base::Promise<void> learnt_;
  const base::Future<void> known_ = learnt_.future();
  std::vector<std::string> names_;  // written before `learnt_`, read after
  std::shared_ptr<const All> all_;  // by mutex_
};

}  // namespace distrain::rpc
