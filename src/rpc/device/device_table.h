#pragma once

#include "distrain/rpc/agent.h"
#include "distrain/wire/handshake.h"

namespace distrain::rpc {

/// Converts a wire device to a device of this process. Throws `protocol` if it does not exist.
c10::Device to_c10(wire::DeviceRef device);
/// Converts a device for the wire. Throws `invalid` if tensors on the device cannot be sent.
wire::DeviceRef to_wire(c10::Device device);
std::string device_text(wire::DeviceRef device);

/// Determines the device on which a tensor arrives, from all ranks' devices and maps. Thread-safe.
class DeviceTable {
 public:
  DeviceTable(int rank, c10::Device home, std::vector<DeviceMap> maps);
  /// Sets this rank's device. Throws `invalid` after freeze().
  void set_home(c10::Device home);
  /// Fixes this rank's device and maps, and returns what the other ranks must know about them. Must
  /// not run on the loop, because it queries the devices. Throws `invalid` if tensors on a device
  /// of this type cannot be sent.
  wire::RankDevices freeze();
  /// Sets the devices of all ranks, once. Functions that need these devices wait until then.
  void learn(std::vector<std::string> names, std::vector<wire::RankDevices> devices);
  /// Replaces the devices of `rank`, which has a new process. Throws if a device map of any rank
  /// names a device that its target rank does not have.
  void learn_again(int rank, wire::RankDevices devices);
  void fail(const base::Error& error) { learnt_.fail(error); }

  c10::Device home() const {
    std::lock_guard lock(mutex_);
    return home_;
  }
  /// Returns the device of any rank. Waits for learn().
  wire::DeviceRef home_of(int rank) const {
    known_.wait();
    return all()->at(static_cast<size_t>(rank)).home;
  }
  /// Returns the device on rank `to` where a tensor on `device` arrives. Waits for learn(), unless
  /// `device` is the CPU. Throws `invalid` if no map covers `device`.
  wire::DeviceRef target(int to, c10::Device device) const;

 private:
  using All = std::vector<wire::RankDevices>;
  /// Returns an immutable snapshot of the devices of all ranks.
  std::shared_ptr<const All> all() const {
    std::lock_guard lock(mutex_);
    return all_;
  }

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

// The functions below keep work that passes from one thread to another in order on the devices: see
// Note [Streams] in distrain/rpc/device.h. They do nothing if no device is in use or the thread's
// current streams are the default ones. Thread-safe.

/// Sets the type of this process's accelerators, which are all of one type. From then on, completed
/// futures and the functions below keep work in streams of this type in order.
void use_streams_of(c10::DeviceType type);

/// Wraps a continuation so that it runs with the current streams of the thread that calls this.
base::Task under_this_thread(base::Task task);

/// Makes this thread's non-default streams wait for the workers' work in the default streams.
void follow_workers() noexcept;

}  // namespace distrain::rpc
