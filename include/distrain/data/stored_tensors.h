#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/named_tensors.h"
#include "distrain/data/safetensors.h"

namespace distrain::data {

/// What safetensors writes of `tensor`; `kept` gets what its span points into.
StoredTensor to_stored(const at::Tensor& tensor, std::vector<at::Tensor>& kept);

/// A copy, on the CPU.
at::Tensor to_tensor(const StoredTensor& stored);

/// The tensors of a safetensors file, by name. Throws `bad_data`.
NamedTensors read_tensors(const std::string& path);

}  // namespace distrain::data
