#pragma once

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

// Note [Moving tensors between ranks]
//
// A tensor on a GPU arrives on the receiver's GPU, a CPU tensor arrives on the CPU. So a CPU tensor
// is sent as it is, and the receiver moves it to its device with to_device(). A rank with a GPU
// moves a tensor to the CPU with for_rank() before it sends the tensor to a rank without a GPU.
// Both functions do nothing if there is nothing to move. Autograd records a move, so the gradient
// returns to the device that the tensor came from.

/// Returns `tensor` on `device`, copied if necessary.
at::Tensor to_device(const at::Tensor& tensor, c10::Device device);

/// Throws torch's IndexError, as CPU lookups do, if an element of `index` is not a row of `table`.
/// Does nothing for a CPU table. The CPU checks the values, because a lookup with a wrong index
/// would make a GPU unusable for this process. So `index` should be on the CPU already.
void check_rows(const at::Tensor& index, const at::Tensor& table);
/// Checks rows as check_rows() does, also for a CPU table. Ignores an `index` that is not integer.
void expect_rows(const at::Tensor& index, const at::Tensor& table);

/// Returns `tensor` on a device from which it can be sent to `rank`: this rank's device if `rank`
/// has an accelerator, otherwise the CPU. A CPU tensor is returned unchanged.
at::Tensor for_rank(const Agent& agent, int rank, const at::Tensor& tensor);

}  // namespace distrain::rpc
