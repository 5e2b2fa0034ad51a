#include "distrain/data/named_tensors.h"

#include <vector>

#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/error.h"
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

NamedTensors named_tensors(const std::string& name, const torch::nn::Module& module) {
  NamedTensors named;
  for (const auto& item : module.named_parameters()) named[name + "." + item.key()] = item.value();
  for (const auto& item : module.named_buffers()) named[name + "." + item.key()] = item.value();
  return named;
}

void copy_into(const NamedTensors& live, const NamedTensors& saved) {
  const auto fail = [](const std::string& why) {
    throw base::Exception(base::ErrorKind::kBadData, why);
  };
  const at::NoGradGuard no_grad;
  for (const auto& [name, into] : live) {
    const auto it = saved.find(name);
    if (it == saved.end()) fail("no " + name);
    at::Tensor target = into;
    if (it->second.sizes() != target.sizes() || it->second.scalar_type() != target.scalar_type()) {
      fail(name + " has another shape or dtype");
    }
    target.copy_(it->second);
  }
  for (const auto& [name, tensor] : saved) {
    if (!live.contains(name)) fail("it has " + name + ", which the model has not");
  }
}

}  // namespace distrain::data
