#pragma once

#include <memory>
#include <string>

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/rpc/agent.h"

namespace distrain::cuda {

/// What averages tensors wherever the ranks of a group have them.
struct DeviceReduceGroup {
  std::shared_ptr<collective::ReduceGroup> group;
  std::string how;  ///< nccl, or staged (over the CPU); empty where this rank is on the CPU
};

/// Over NCCL if each rank of `backend` has its own GPU. Collective; after Agent::join().
DeviceReduceGroup make_reduce_group(rpc::Agent& agent,
                                    const c10::intrusive_ptr<collective::Backend>& backend);

}  // namespace distrain::cuda
