#pragma once

#include <ATen/core/Tensor.h>

#include "distrain/rpc/agent.h"
#include "distrain/scenario/named_tensors.h"

namespace distrain::scenario {

// Note [Tensors on their way]
//
// A rank computes on its device. What it sends must be on a device that arrives where the other
// rank computes: tensors of a GPU arrive on the other one's GPU, those of the CPU on the CPU. Where
// one of two ranks has a GPU and the other has none, the rank with the GPU moves what it sends to
// the CPU and what it gets to the GPU, and says so by the functions below; elsewhere they do
// nothing. They leave a node in the graph, so gradients come back on the device of what was moved.

/// `tensor`, which this rank got or made, where it computes.
at::Tensor placed(const at::Tensor& tensor, c10::Device device);

/// `tensor` as it can travel to `rank`.
at::Tensor for_rank(const rpc::Agent& agent, int rank, const at::Tensor& tensor);

/// Their values on the CPU, without a graph: for checkpoints.
NamedTensors on_host(const NamedTensors& tensors);

}  // namespace distrain::scenario
