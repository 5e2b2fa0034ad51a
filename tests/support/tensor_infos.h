// Describes tensors for the header of a safetensors file.
#pragma once

#include "distrain/store/safetensors.h"

namespace distrain::testing {

inline std::vector<store::TensorInfo> infos_of(const rpc::NamedTensors& tensors) {
  std::vector<store::TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) {
    infos.emplace_back(name, tensor.scalar_type(), tensor.sizes().vec());
  }
  return infos;
}

}  // namespace distrain::testing
