#pragma once

#include <chrono>

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/cuda/plugin.h"
#include "distrain/rpc/agent.h"

namespace distrain::cuda {

struct NcclTimeouts {
  /// Time limit for all ranks to join a new communicator, after they have agreed to create it.
  std::chrono::milliseconds join{60000};
  /// Delay before an NCCL error is reported. A rank that is lost by then is reported as the cause.
  std::chrono::milliseconds loss_grace{1000};
};

/// Creates a ReduceGroup for ranks with a GPU each. NCCL moves device tensors, and `control` moves
/// CPU tensors. duplicate() returns null, because all operations have one order.
///
/// The ranks agree on each operation through `control` before it is given to NCCL. So a rank that
/// refuses, dies, is late or calls another operation is noticed, and wait() throws the error. If
/// NCCL fails after wait() has ordered a stream behind NCCL's work, failure() returns the error,
/// and the next operation throws it on all ranks. A failure ends all communicators; the next
/// operation creates new ones. The destructor finishes all operations and waits some seconds for
/// NCCL to end. `plugin` must outlive the group.
std::unique_ptr<collective::ReduceGroup> make_nccl_reduce_group(
    c10::intrusive_ptr<collective::Backend> control, const Plugin& plugin,
    NcclTimeouts timeouts = {});

/// A ReduceGroup for the ranks' devices, and the name of its transport.
struct DeviceReduceGroup {
  std::shared_ptr<collective::ReduceGroup> group;
  std::string how;  ///< `nccl`, `staged` (over the CPU), or empty if this rank is on the CPU
};

/// Returns a group that uses NCCL if each rank of `backend` has its own GPU, and otherwise one that
/// reduces on the CPU over `backend`. All ranks of `backend` must call it, after Agent::join().
DeviceReduceGroup make_reduce_group(rpc::Agent& agent,
                                    const c10::intrusive_ptr<collective::Backend>& backend);

}  // namespace distrain::cuda
