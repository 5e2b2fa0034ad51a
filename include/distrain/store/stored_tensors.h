#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/rpc/named_tensors.h"
#include "distrain/store/safetensors.h"

namespace distrain::store {

/// Returns `tensor` for a safetensors file, and appends the owner of its bytes to `kept`.
StoredTensor to_stored(const at::Tensor& tensor, std::vector<at::Tensor>& kept);

at::Tensor to_tensor(const StoredTensor& stored);

/// Reads the tensors of a safetensors file. Throws `bad_data`.
rpc::NamedTensors read_tensors(const std::string& path);

}  // namespace distrain::store
