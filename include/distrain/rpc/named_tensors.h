#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>

namespace distrain::rpc {

/// Tensors by name, such as "fc.weight".
using NamedTensors = std::map<std::string, at::Tensor>;

}  // namespace distrain::rpc
