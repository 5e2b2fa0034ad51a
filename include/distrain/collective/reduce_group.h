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

  /// Makes this thread's current stream of the tensor's device wait for the result. On the CPU,
  /// blocks until the result is in the tensor. Throws the errors of Pending::wait().
  virtual void wait() = 0;
};

/// Collective operations on a model's gradients and parameters, independent of the transport.
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
  /// Returns the job rank of group rank `rank`.
  virtual int world_rank(int rank) const = 0;

  /// Returns another group of the same ranks with an independent order of operations, or null if
  /// this group does not support that. All ranks call duplicate() in the same order.
  virtual std::shared_ptr<ReduceGroup> duplicate() = 0;

  /// Returns an uninitialised tensor of `count` elements. An average of the whole tensor may copy
  /// less than that of others; all ranks must give it such tensors, or none. After an average has
  /// failed, do not use its tensor, because other ranks may still write to it.
  virtual at::Tensor allocate(int64_t count, const at::TensorOptions& options);
  /// Starts to average `bucket` in place. Fails with `invalid` if the ranks' passes disagree.
  virtual WorkPtr average_async(const at::Tensor& bucket, const PassNumber& pass) = 0;
  WorkPtr average_async(const at::Tensor& bucket) { return average_async(bucket, PassNumber{}); }
  /// Starts to copy `tensor` of group rank `root` into `tensor` of the other ranks.
  virtual WorkPtr broadcast(const at::Tensor& tensor, int root) = 0;
  /// Skips the next `count` operations on this rank and makes them fail with `error` on the others.
  virtual void refuse(int count, const base::Error& error) = 0;
  /// Returns the error of a device operation that failed after its wait() had returned. The next
  /// device operation throws the error and clears it. Before you keep results, wait on the host for
  /// the device and call failure(). Any thread may call it.
  virtual std::optional<base::Error> failure() const = 0;

  /// Waits until `device` has done all its work, then throws failure() if there is one. Does
  /// nothing on the CPU. Call check() before averaged results are kept or evaluated.
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
