#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace distrain::data {

/// Parameters by the names that PyTorch's modules give them.
using NamedTensors = std::map<std::string, at::Tensor>;

/// Their values on the CPU, without a graph: for checkpoints.
NamedTensors on_host(const NamedTensors& tensors);

/// Of a module, under `name`: parameters and buffers, as in "name.weight".
NamedTensors named_tensors(const std::string& name, const torch::nn::Module& module);
/// Copies values into tensors of these names, shapes and dtypes. `bad_data` for another set.
void copy_into(const NamedTensors& live, const NamedTensors& saved);

}  // namespace distrain::data
