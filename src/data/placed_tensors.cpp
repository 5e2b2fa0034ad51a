#include "distrain/data/placed_tensors.h"

#include <vector>

#include "distrain/base/thread_state.h"
#include "distrain/rpc/device.h"

namespace distrain::data {

at::Tensor placed(const at::Tensor& tensor, c10::Device device) {
  if (tensor.device() == device) return tensor;
  if (rpc::is_accelerator(device)) return tensor.to(device, /*non_blocking=*/tensor.is_cpu());
  const base::BlockingScope waits;  // for the device
  return tensor.to(device);
}

at::Tensor for_rank(const rpc::Agent& agent, int rank, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const bool arrives_on_cpu = agent.device_of(rank) == c10::Device(c10::kCPU).str();
  return placed(tensor, arrives_on_cpu ? c10::Device(c10::kCPU) : agent.device());
}

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
