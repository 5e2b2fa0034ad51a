#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/safetensors.h"

namespace distrain::data {

/// What safetensors writes of `tensor`; `kept` gets what its span points into.
data::StoredTensor to_stored(const at::Tensor& tensor, std::vector<at::Tensor>& kept);

/// A copy, on the CPU.
at::Tensor to_tensor(const data::StoredTensor& stored);

}  // namespace distrain::data
