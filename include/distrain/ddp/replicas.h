#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/collective/reduce_group.h"
#include "distrain/ddp/reducer.h"

namespace distrain::ddp {

/// Throws `invalid` on all ranks unless the names, shapes, dtypes and requires_grad of `tensors`,
/// and which of them share a device, are equal on all ranks. The error names the first rank and
/// tensor that differ from rank 0's. A collective call.
void check_same_everywhere(const std::vector<NamedParameter>& tensors,
                           collective::ReduceGroup& group);

/// Copies the values of dense `tensors` from group rank 0 to the other ranks, in the order of this
/// thread's current streams, hidden from autograd. A collective call; one message for each device.
void broadcast_values(const std::vector<at::Tensor>& tensors, collective::ReduceGroup& group);

}  // namespace distrain::ddp
