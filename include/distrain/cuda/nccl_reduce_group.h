#pragma once

#include <functional>
#include <memory>

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/cuda/plugin.h"

namespace distrain::cuda {

/// A ReduceGroup whose ranks have a GPU each: NCCL moves tensors of devices, our own Backend those
/// of the CPU.
///
/// The Backend also keeps the ranks together: they agree on each operation there before NCCL is
/// given it, so that one that refuses, dies, is late or calls something else is noticed as ever,
/// and an error comes out of wait(). Whatever goes wrong ends the communicators of all ranks; the
/// next operation makes new ones.
class NcclReduceGroup final : public collective::ReduceGroup {
 public:
  /// Plugin's functions of these names.
  struct Nccl {
    std::function<NcclId()> new_id;
    std::function<std::unique_ptr<NcclCommunicator>(const NcclId& id, int size, int rank,
                                                    int device_index)>
        make_communicator;
  };

  NcclReduceGroup(c10::intrusive_ptr<collective::Backend> control, Nccl nccl);
  /// `plugin` must outlive this object.
  NcclReduceGroup(c10::intrusive_ptr<collective::Backend> control, const Plugin& plugin);
  /// Sees to all that was called.
  ~NcclReduceGroup() override;

  int rank() const override;
  int size() const override;
  int world_rank(int rank) const override;
  WorkPtr start(const at::Tensor& bucket) override;
  WorkPtr broadcast(const at::Tensor& tensor, int root) override;
  void refuse(int count, const base::Error& error) override;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace distrain::cuda
