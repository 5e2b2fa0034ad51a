#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "distrain/collective/backend.h"
#include "distrain/collective/backend_queue.h"
#include "distrain/collective/reduce_group.h"

namespace distrain::collective {

/// A ReduceGroup over Backend that reduces device tensors on the CPU, by copies in pinned memory.
///
/// Operations on CPU and device tensors share one order, so an operation that waits for its copy
/// delays the operations behind it. The destructor runs all operations that have been called.
class StagedReduceGroup final : public ReduceGroup {
 public:
  /// `sequence` numbers the operations in `backend`; 0 shares the order of direct calls to it.
  explicit StagedReduceGroup(c10::intrusive_ptr<Backend> backend, uint32_t sequence = 0);
  ~StagedReduceGroup() override;

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  int world_rank(int rank) const override { return backend_->world_rank(rank); }
  std::shared_ptr<ReduceGroup> duplicate() override;
  using ReduceGroup::average_async;
  WorkPtr average_async(const at::Tensor& bucket, const PassNumber& pass) override;
  WorkPtr broadcast(const at::Tensor& tensor, int root) override;
  void refuse(int count, const base::Error& error) override;
  /// Always empty, because wait() throws all failures.
  std::optional<base::Error> failure() const override { return std::nullopt; }

 private:
  class HostBuffers;
  class StagedWork;

  const c10::intrusive_ptr<Backend> backend_;
  const uint32_t sequence_;
  const std::shared_ptr<HostBuffers> buffers_;
  BackendQueue queue_;
};

}  // namespace distrain::collective
