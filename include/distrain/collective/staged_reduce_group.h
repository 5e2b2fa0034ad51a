#pragma once

#include <functional>

#include "distrain/base/thread_pool.h"
#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"

namespace distrain::collective {

/// A queue of Backend calls. A call that must wait for a copy from a device runs on the queue's
/// thread, and so do the calls behind it. While the queue is empty, a call that waits for no copy
/// runs on the caller's thread, so users of CPU tensors never start the queue's thread.
///
/// Thread-safe; the caller determines the order of calls. The destructor runs all queued calls.
class BackendQueue {
 public:
  /// `name`, of at most 15 characters, names the thread. Operations use `sequence` of `backend`.
  BackendQueue(c10::intrusive_ptr<Backend> backend, std::string name, uint32_t sequence = 0)
      : backend_(std::move(backend)), sequence_(sequence), queue_(std::move(name)) {}

  using Call = std::function<Pending(const at::Tensor&)>;
  Call average(const PassNumber& pass) const;
  Call broadcast(int root) const;
  /// Calls `call` with the CPU tensor `tensor`: at once if the queue is empty, else in its turn.
  ReduceGroup::WorkPtr run(Call call, const at::Tensor& tensor);

  void refuse(int count, const base::Error& error);

  /// Queues `call` to run when the device copy that ends at `copied` is done. If the copy fails,
  /// the operation fails on all ranks.
  base::Future<Pending> call_behind(rpc::StreamPoint copied, std::function<Pending()> call);
  /// Queues `task` for the queue's thread. `task` must not throw.
  void post(base::Task task) { queue_.post(std::move(task)); }

 private:
  const c10::intrusive_ptr<Backend> backend_;
  const uint32_t sequence_;
  base::SerialThread queue_;
};

/// A ReduceGroup over Backend that reduces device tensors on the CPU, by copies in pinned memory.
///
/// Operations on CPU and device tensors share one order, so an operation that waits for its copy
/// delays the operations behind it. The destructor runs all operations that have been called.
class StagedReduceGroup final : public ReduceGroup {
 public:
  /// Uses `sequence` of `backend`. Direct calls to `backend` are operations of sequence 0.
  explicit StagedReduceGroup(c10::intrusive_ptr<Backend> backend, uint32_t sequence = 0);

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  int world_rank(int rank) const override { return backend_->world_rank(rank); }
  std::shared_ptr<ReduceGroup> duplicate() override {
    return std::make_shared<StagedReduceGroup>(backend_, backend_->new_sequence());
  }
  at::Tensor allocate(int64_t count, const at::TensorOptions& options) override;
  using ReduceGroup::average_async;
  WorkPtr average_async(const at::Tensor& bucket, const PassNumber& pass) override {
    return start(bucket, queue_.average(pass), true, true);
  }
  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    return start(tensor, queue_.broadcast(root), root == rank(), root != rank());
  }
  void refuse(int count, const base::Error& error) override { queue_.refuse(count, error); }
  /// Returns nullopt, because wait() throws all errors.
  std::optional<base::Error> failure() const override { return std::nullopt; }

 private:
  class HostBuffers;
  class StagedWork;

  WorkPtr start(const at::Tensor& tensor, BackendQueue::Call call, bool sends, bool receives);

  const c10::intrusive_ptr<Backend> backend_;
  const std::shared_ptr<HostBuffers> buffers_;
  BackendQueue queue_;
};

}  // namespace distrain::collective
