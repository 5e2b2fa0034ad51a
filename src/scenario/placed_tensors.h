#pragma once

#include <ATen/core/Tensor.h>

#include "distrain/rpc/placed.h"
#include "distrain/scenario/named_tensors.h"

namespace distrain::scenario {

using rpc::for_rank;
using rpc::placed;

/// Their values on the CPU, without a graph: for checkpoints.
NamedTensors on_host(const NamedTensors& tensors);

}  // namespace distrain::scenario
