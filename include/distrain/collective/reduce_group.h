#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "distrain/base/error.h"
#include "distrain/collective/pass_number.h"
#include "distrain/rpc/device.h"

namespace distrain::collective {

/// What a ReduceGroup has started. Keep it and wait for it; one thread at a time.
class ReduceWork {
 public:
  virtual ~ReduceWork() = default;

  /// Returns when this thread's current stream of the tensor's device is in order behind the
  /// result; on the CPU, when the result is there. Throws as Pending::wait does.
  virtual void wait() = 0;
};

/// What a reducer needs of a group of ranks, whatever moves the bytes.
///
/// All ranks call the same operations in the same order; calls return at once as a rule, and any
/// number may be under way. Results are written in place. Tensors are dense and contiguous; what
/// they hold is taken behind all that the caller's current stream has been given, and they must not
/// be touched until the operation is complete. Thread-safe, but the order of calls is the user's.
class ReduceGroup {
 public:
  using WorkPtr = std::shared_ptr<ReduceWork>;

  virtual ~ReduceGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// The number in the job of a rank within the group.
  virtual int world_rank(int rank) const = 0;

  /// The same ranks with operations of their own, which are in order among themselves only; null:
  /// there is but one order. On all ranks, in the same order.
  virtual std::shared_ptr<ReduceGroup> fork() = 0;

  /// Replaces `bucket` by its mean over the ranks. `invalid` if their passes do not agree.
  virtual WorkPtr start(const at::Tensor& bucket, const PassNumber& pass) = 0;
  WorkPtr start(const at::Tensor& bucket) { return start(bucket, PassNumber{}); }
  /// `root` is a rank within the group.
  virtual WorkPtr broadcast(const at::Tensor& tensor, int root) = 0;
  /// Takes the place of the next `count` operations: on the other ranks they fail with `error`.
  virtual void refuse(int count, const base::Error& error) = 0;
  /// Why an operation that wait() has only put into the order of a stream did not come to its end
  /// after all, until somebody has been told: the next operation on a device throws it, too. To be
  /// asked before results are kept, when they have been waited for on the host. Any thread.
  virtual std::optional<base::Error> failure() const = 0;

  /// Before what was averaged is kept or judged: waits until `device` has done what it was given,
  /// and throws a failure(). Nothing on CPUs.
  void check(c10::Device device) const {
    if (!rpc::is_accelerator(device)) return;
    rpc::StreamPoint::mark(device).wait_on_host();
    if (const auto error = failure()) throw base::Exception(*error);
  }
};

}  // namespace distrain::collective
