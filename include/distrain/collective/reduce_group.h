#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/collective/pass_number.h"
#include "distrain/rpc/device.h"

namespace distrain::collective {

/// An operation that a ReduceGroup has started. Call wait(), from one thread at a time.
class ReduceWork {
 public:
  virtual ~ReduceWork() = default;

  /// Orders this thread's current stream of the tensor's device after the result; on the CPU,
  /// blocks until the result is in the tensor. Throws as Pending::wait does.
  virtual void wait() = 0;
};

/// The collective operations of a Reducer, independent of the transport.
///
/// All ranks call the same operations in the same order. Most calls return at once, and any number
/// of operations may be in flight. Results are written in place. Tensors are dense and contiguous.
/// An operation reads its tensor after all work in the caller's current stream; do not touch the
/// tensor until the operation is complete. Thread-safe; the caller determines the order of calls.
class ReduceGroup {
 public:
  using WorkPtr = std::shared_ptr<ReduceWork>;

  virtual ~ReduceGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Returns the rank in the job of group rank `rank`.
  virtual int world_rank(int rank) const = 0;

  /// Returns a group of the same ranks whose operations have an order of their own, or null if the
  /// group supports one order only. All ranks call it in the same order.
  virtual std::shared_ptr<ReduceGroup> duplicate() = 0;

  /// Starts to replace `bucket` by its mean. Fails with `invalid` if the ranks' passes disagree.
  virtual WorkPtr average_async(const at::Tensor& bucket, const PassNumber& pass) = 0;
  WorkPtr average_async(const at::Tensor& bucket) { return average_async(bucket, PassNumber{}); }
  /// `root` is a rank within the group.
  virtual WorkPtr broadcast(const at::Tensor& tensor, int root) = 0;
  /// Refuses the next `count` operations: they fail with `error` on the other ranks.
  virtual void refuse(int count, const base::Error& error) = 0;
  /// Returns the error of a device operation that failed after its wait() had returned, until the
  /// next device operation has thrown that error. Call it after waiting for the device on the host,
  /// before results are kept. Any thread.
  virtual std::optional<base::Error> failure() const = 0;

  /// Waits until `device` has done all its work, then throws failure() if there is one. Call it
  /// before averaged results are kept or evaluated. Does nothing on the CPU.
  void check(c10::Device device) const {
    if (!rpc::is_accelerator(device)) return;
    rpc::StreamPoint::mark(device).wait_on_host();
    if (const auto error = failure()) throw base::Exception(*error);
  }
};

/// Numbers devices by their first use, so that ranks can compare which tensors share a device.
class DeviceNumbers {
 public:
  size_t number_of(c10::Device device) {
    const auto it = std::find(devices_.begin(), devices_.end(), device);
    if (it != devices_.end()) return static_cast<size_t>(it - devices_.begin());
    devices_.push_back(device);
    return devices_.size() - 1;
  }

 private:
  std::vector<c10::Device> devices_;
};

}  // namespace distrain::collective
