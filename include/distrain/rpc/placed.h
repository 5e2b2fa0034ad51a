#pragma once

#include <ATen/core/Tensor.h>

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

// Note [Tensors on their way]
//
// A rank computes on its device. Tensors of a GPU arrive on the other rank's GPU, those of the CPU
// on the CPU. So what was made on the CPU is sent as it is, and whoever computes with it moves it
// to its device; and a rank with a GPU moves what it sends to one without to the CPU. Both say so
// by the functions below, which do nothing where there is nothing to do. They leave a node in the
// graph, so gradients come back on the device of what was moved.

/// `tensor`, which this rank got or made, where it computes.
at::Tensor placed(const at::Tensor& tensor, c10::Device device);

/// Throws torch's IndexError, as its lookups on the CPU do, if one of `index` is no row of `table`.
/// A device fails for good over such a lookup, for all ranks that use it; so this looks at the
/// numbers on the CPU, where `index` should still be. Does nothing for a table on the CPU.
void check_rows(const at::Tensor& index, const at::Tensor& table);
/// As check_rows(), for a table on any device. Does nothing if `index` has no integers.
void expect_rows(const at::Tensor& index, const at::Tensor& table);

/// `tensor` as it can travel to `rank`: one of a GPU from this rank's device, or from the CPU.
at::Tensor for_rank(const Agent& agent, int rank, const at::Tensor& tensor);

}  // namespace distrain::rpc
