// Describes tensors for the header of a safetensors file, and reads a file in memory.
#pragma once

#include <algorithm>

#include "distrain/store/safetensors.h"

namespace distrain::testing {

inline std::vector<store::TensorInfo> infos_of(const rpc::NamedTensors& tensors) {
  std::vector<store::TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) {
    infos.emplace_back(name, tensor.scalar_type(), tensor.sizes().vec());
  }
  return infos;
}

inline rpc::NamedTensors parse_safetensors(const std::vector<uint8_t>& bytes,
                                           const std::string& name) {
  const auto read = [&](uint64_t offset, std::span<uint8_t> out) {
    std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(offset), out.size(), out.begin());
  };
  const store::SafetensorsFile file(name, bytes.size(), read);
  rpc::NamedTensors tensors;
  for (const auto& [each, info] : file.tensors()) tensors[each] = file.tensor(each);
  return tensors;
}

}  // namespace distrain::testing
