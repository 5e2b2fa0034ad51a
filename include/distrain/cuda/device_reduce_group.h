#pragma once

#include <memory>
#include <string>

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/rpc/agent.h"

namespace distrain::cuda {

/// A ReduceGroup for the devices of a group's ranks.
struct DeviceReduceGroup {
  std::shared_ptr<collective::ReduceGroup> group;
  std::string how;  ///< `nccl`, `staged` (over the CPU), or empty if this rank is on the CPU
};

/// Returns a group that uses NCCL if each rank of `backend` has its own GPU, and otherwise one that
/// reduces on the CPU over `backend`. All ranks of `backend` must call it, after Agent::join().
DeviceReduceGroup make_reduce_group(rpc::Agent& agent,
                                    const c10::intrusive_ptr<collective::Backend>& backend);

}  // namespace distrain::cuda
