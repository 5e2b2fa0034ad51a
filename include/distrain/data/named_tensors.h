#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>

namespace distrain::data {

/// Parameters by the names that PyTorch's modules give them.
using NamedTensors = std::map<std::string, at::Tensor>;

/// Their values on the CPU, without a graph: for checkpoints.
NamedTensors on_host(const NamedTensors& tensors);

}  // namespace distrain::data
