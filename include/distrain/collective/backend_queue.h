#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "distrain/base/future.h"
#include "distrain/base/thread_pool.h"
#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/rpc/device.h"

namespace distrain::collective {

/// A queue of Backend calls. A call that must wait for a copy runs on the queue's thread, and so do
/// the calls behind it. While the queue is empty, a call without a copy runs on the caller's
/// thread, so users of CPU tensors never start the queue's thread.
///
/// Thread-safe; the caller determines the order of calls. The destructor runs all queued calls.
class BackendQueue {
 public:
  /// `name` is the thread's name, of at most 15 characters; `sequence` is used for all calls.
  BackendQueue(c10::intrusive_ptr<Backend> backend, std::string name, uint32_t sequence = 0);

  // CPU tensors only.
  ReduceGroup::WorkPtr average_async(const at::Tensor& tensor, const PassNumber& pass);
  ReduceGroup::WorkPtr broadcast(const at::Tensor& tensor, int root);

  void refuse(int count, const base::Error& error);

  /// Queues `call`, which runs when `copied` is reached. If the copy fails, refuses one operation.
  base::Future<Pending> call_behind(rpc::StreamPoint copied, std::function<Pending()> call);
  /// Queues `task` for the queue's thread. `task` must not throw.
  void post(base::Task task) { queue_.post(std::move(task)); }

 private:
  ReduceGroup::WorkPtr call(std::function<Pending()> call);

  const c10::intrusive_ptr<Backend> backend_;
  const uint32_t sequence_;
  base::SerialThread queue_;
};

}  // namespace distrain::collective
