#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/collective/reduce_group.h"
#include "distrain/ddp/reducer.h"

namespace distrain::ddp {

/// Throws `invalid` on every rank of the group unless all have the same list: names, shapes, dtypes
/// which require a gradient, and which are on one device. Names the first rank and entry that
/// differ from rank 0's. A collective call.
void check_same_everywhere(const std::vector<NamedParameter>& tensors,
                           collective::ReduceGroup& group);

/// Overwrites the values of `tensors` (dense) by those of the group's rank 0, in order with this
/// thread's current streams. Autograd takes no notice. Collective; one message for each device.
void broadcast_values(const std::vector<at::Tensor>& tensors, collective::ReduceGroup& group);

}  // namespace distrain::ddp
