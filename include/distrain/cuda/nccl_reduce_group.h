#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/cuda/plugin.h"

namespace distrain::cuda {

/// How a group over NCCL makes its communicators.
struct Nccl {
  // Plugin's functions of these names.
  std::function<NcclId()> new_id;
  std::function<std::unique_ptr<NcclCommunicator>(const NcclId& id, int size, int rank,
                                                  int device_index)>
      make_communicator;
  /// How long the ranks of a new communicator, which have agreed to make it, wait for each other.
  std::chrono::milliseconds join_timeout{60000};
  /// How long what NCCL says is held back, for the group to name a lost rank as its cause.
  std::chrono::milliseconds loss_grace{1000};
};

/// Creates a ReduceGroup of ranks with a GPU each: NCCL moves device tensors, our Backend CPU
/// tensors. It cannot fork: the order of all operations is that in which the ranks agree on them.
///
/// The Backend also keeps the ranks together: they agree on each operation there before NCCL is
/// given it, so that one that refuses, dies, is late or calls something else is noticed as ever,
/// and an error comes out of wait(). What goes wrong later, once wait() has put NCCL's work into
/// the order of a stream, failure() tells, and the next operation fails with it on all ranks. Any
/// failure ends the communicators of all ranks; the next operation makes new ones.
///
/// The group's destructor sees to all that was called, and waits some seconds for NCCL to end its
/// communicators.
std::unique_ptr<collective::ReduceGroup> make_nccl_reduce_group(
    c10::intrusive_ptr<collective::Backend> control, Nccl nccl);
/// `plugin` must outlive the group.
std::unique_ptr<collective::ReduceGroup> make_nccl_reduce_group(
    c10::intrusive_ptr<collective::Backend> control, const Plugin& plugin);

}  // namespace distrain::cuda
