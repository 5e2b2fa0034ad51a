#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "distrain/collective/backend.h"
#include "distrain/collective/backend_line.h"
#include "distrain/collective/reduce_group.h"

namespace distrain::collective {

/// A ReduceGroup over our own Backend. Tensors of the CPU are the Backend's at once. Those of a
/// device are copied to pinned memory beside the computing, reduced on the CPU, and copied back.
///
/// The order of operations is that of the calls for all of them: one that waits for its copy makes
/// those behind it wait, too. The destructor sees to all that was called.
class StagedReduceGroup final : public ReduceGroup {
 public:
  /// `sequence`: that of its operations; 0: they are in one order with the Backend's own.
  explicit StagedReduceGroup(c10::intrusive_ptr<Backend> backend, uint32_t sequence = 0);
  ~StagedReduceGroup() override;

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  int world_rank(int rank) const override { return backend_->world_rank(rank); }
  std::shared_ptr<ReduceGroup> fork() override;
  using ReduceGroup::start;
  WorkPtr start(const at::Tensor& bucket, const PassNumber& pass) override;
  WorkPtr broadcast(const at::Tensor& tensor, int root) override;
  void refuse(int count, const base::Error& error) override;
  /// None: wait() knows all that can go wrong with what the Backend moves.
  std::optional<base::Error> failure() const override { return std::nullopt; }

 private:
  class HostBuffers;
  class Staged;

  const c10::intrusive_ptr<Backend> backend_;
  const uint32_t sequence_;
  const std::shared_ptr<HostBuffers> buffers_;
  BackendLine line_;
};

}  // namespace distrain::collective
