#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/collective/backend.h"
#include "distrain/ddp/reducer.h"

namespace distrain::ddp {

/// Throws `invalid` on every rank of the group unless all have the same list: names, shapes, dtypes
/// and which require a gradient. Names the first rank and entry that differ from rank 0's.
/// A collective call.
void check_same_everywhere(const std::vector<NamedParameter>& tensors,
                           collective::Backend& backend);

/// Overwrites the values of `tensors` (dense, CPU) by those of the group's rank 0. Autograd takes
/// no notice. A collective call; one message for all of them.
void broadcast_values(const std::vector<at::Tensor>& tensors, collective::Backend& backend);

}  // namespace distrain::ddp
