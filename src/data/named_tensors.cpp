#include "distrain/data/named_tensors.h"

#include <vector>

#include "distrain/rpc/device.h"

namespace distrain::data {

NamedTensors on_host(const NamedTensors& tensors) {
  NamedTensors copies = tensors;
  std::vector<at::Tensor> of_devices;
  for (auto& [name, tensor] : copies) {
    if (!tensor.defined()) continue;
    tensor = tensor.detach();
    if (!tensor.is_cpu()) of_devices.push_back(tensor);
  }
  if (of_devices.empty()) return copies;
  const std::vector<at::Tensor> on_cpu = rpc::to_host(of_devices);
  auto next = on_cpu.begin();
  for (auto& [name, tensor] : copies) {
    if (tensor.defined() && !tensor.is_cpu()) tensor = *next++;
  }
  return copies;
}

}  // namespace distrain::data
